"""The command line: what it prints, its exit codes, and every refusal before anything is loaded."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
import tiny_tokenizer

from musejax import cli
from musejax.commands import generate
from musejax.config import MINI
from musejax.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.build())


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder with everything but weights."""
    path = tiny_tokenizer.write(tmp_path / "ckpt")
    (path / "config.json").write_text(json.dumps(MINI.to_hf()))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [TOKENIZER.end_id]}))
    (path / "model.safetensors").touch()
    return path


class Engine:
    """Stands in for loading and decoding; `reply` is what the model says, as text with special tokens or as ids."""

    def __init__(self):
        self.reply = "It is 4.<|eot|><|end_of_text|>"
        self.interrupt = False
        self.request = None

    def load(self, args, request):
        self.request = request
        return SimpleNamespace(decode=request.decode)

    def stream(self, model, request):
        ids = self.reply
        if isinstance(ids, str):
            ids = TOKENIZER.encode(ids, bos=False, parse_special=True)
        for i in ids[:request.max_new_tokens]:
            yield SimpleNamespace(id=i, logprob=-0.5)
        if self.interrupt:
            raise KeyboardInterrupt


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(generate, "load_model", engine.load)
    monkeypatch.setattr(generate, "start_stream", engine.stream)
    return engine


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command -> (exit code, stdout, stderr)."""

    def call(*argv, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main([str(a) for a in argv])
        return code, *capsys.readouterr()

    return call


def refused(result, message):
    """Exit code 2, one message that contains the given text, nothing on stdout."""
    code, out, err = result
    assert (code, out) == (2, ""), result
    assert err.startswith("musejax: error: ") and message in err, err
    assert "Traceback" not in err


# ------------------------------------------------------------------ generate


def test_raw_prompt(run, engine, folder):
    code, out, err = run("generate", folder, "--prompt", "What is <|eot|>?")
    assert (code, out) == (0, "It is 4.<|eot|>\n")
    assert f"finish: stop ({TOKENIZER.end_id})" in err and "generated" in err and "tokens" in err
    assert engine.request.prompt == TOKENIZER.encode("What is <|eot|>?", bos=True, parse_special=False)
    assert TOKENIZER.eot_id not in engine.request.prompt
    assert engine.request.stop_ids == (TOKENIZER.end_id,)


def test_prompt_from_file_and_stdin(run, engine, folder, tmp_path):
    (tmp_path / "prompt").write_bytes("né\n\n".encode())
    wanted = TOKENIZER.encode("né\n", bos=True, parse_special=False)
    for options, stdin in ((["--prompt-file", tmp_path / "prompt"], None), ([], "né\n\n".encode()),
                           (["--prompt-file", "-"], "né\n\r\n".encode())):
        assert run("generate", folder, *options, stdin=stdin)[0] == 0
        assert engine.request.prompt == wanted


def test_prompt_ids(run, engine, folder):
    assert run("generate", folder, "--prompt-ids", "1 2, 3")[0] == 0
    assert engine.request.prompt == [1, 2, 3]


def test_without_tokenizer(run, engine, folder):
    (folder / "tokenizer.json").unlink()
    engine.reply = [7, 8, 9]
    code, out, _ = run("generate", folder, "--prompt-ids", "1 2 3", "--max-new-tokens", "2")
    assert (code, out) == (0, "7 8\n")


def test_quiet(run, engine, folder):
    assert run("generate", folder, "--prompt", "a", "--quiet") == (0, "It is 4.<|eot|>\n", "")


def test_text_is_not_given_a_second_line_break(run, engine, folder):
    engine.reply = "a\n"
    assert run("generate", folder, "--prompt", "a")[1] == "a\n"


def test_stop_string(run, engine, folder):
    code, out, err = run("generate", folder, "--prompt", "a", "--stop", "x", "--stop", " 4")
    assert (code, out) == (0, "It is\n")
    assert "finish: stop (' 4')" in err


def test_chat(run, engine, folder):
    engine.reply = " to=self<|message|>2+2<|eom|><|start|>assistant to=user<|message|>It is 4.<|eot|>lost"
    code, out, _ = run("generate", folder, "--chat", "--prompt", "What?", "--system", "Be short.",
                       "--date", "2026-09-25", "--reasoning-effort", "low")
    assert (code, out) == (0, "It is 4.\n")
    assert TOKENIZER.decode(engine.request.prompt) == (
        "<|begin_of_text|><|start|>system<|message|>You help. Today is 25 Sep 2026. Effort: low.<|eot|>"
        "<|start|>system<|message|>Be short.<|eot|><|start|>user<|message|>What?<|eot|><|start|>assistant")
    assert engine.request.prompt.count(TOKENIZER.bos_id) == 1
    assert TOKENIZER.eot_id in engine.request.stop_ids, "even if generation_config.json forgets it"


def test_chat_json(run, engine, folder):
    engine.reply = " to=self<|message|>2+2<|eom|><|start|>assistant to=user<|message|>It is 4.<|eot|>"
    result = json.loads(run("generate", folder, "--chat", "--prompt", "What?", "--json")[1])
    assert result["text"] == "It is 4." and result["raw_text"] == engine.reply.removesuffix("<|eot|>")
    assert result["messages"] == [{"recipient": "self", "text": "2+2"}, {"recipient": "user", "text": "It is 4."}]


def test_chat_without_an_answer(run, engine, folder):
    engine.reply = " to=self<|message|>hmm"
    code, out, err = run("generate", folder, "--chat", "--prompt", "What?")
    assert (code, out) == (0, "\n") and "no message for the user came" in err


def test_json(run, engine, folder):
    code, out, _ = run("generate", folder, "--prompt", "a", "--json", "--seed", "7", "--temperature", "0.5",
                         "--policy", "exact", "--combine", "flat", "--stop", "4", "--implementation", "reference")
    result = json.loads(out)
    ids = TOKENIZER.encode("It is 4", bos=False, parse_special=False)
    assert code == 0 and out.count("\n") == 1
    assert result["text"] == "It is " and (result["finish_reason"], result["stopped_by"]) == ("stop", "4")
    assert result["token_ids"] == ids and result["logprobs"] == [-0.5] * len(ids)
    assert result["prompt_tokens"] == 2 and result["generated_tokens"] == len(ids)
    assert result["checkpoint"] == str(folder) and result["seconds"] > 0
    settings = result["settings"]
    assert (settings["policy"], settings["combine"], settings["implementation"]) == ("exact", "flat", "reference")
    assert (settings["seed"], settings["temperature"]) == (7, 0.5)


def test_json_has_no_nan(run, engine, folder, monkeypatch):
    monkeypatch.setattr(generate, "start_stream", lambda *_: [SimpleNamespace(id=5, logprob=float("nan"))])
    assert json.loads(run("generate", folder, "--prompt", "a", "--json")[1])["logprobs"] == [None]


def test_interrupt_keeps_the_text(run, engine, folder):
    engine.reply, engine.interrupt = "It is", True
    code, out, err = run("generate", folder, "--prompt", "a", "--stop", "is 4")
    assert (code, out) == (130, "It is\n") and "finish: interrupt" in err
    result = json.loads(run("generate", folder, "--prompt", "a", "--json")[1])
    assert (result["text"], result["finish_reason"]) == ("It is", "interrupt")


def test_interrupt_before_the_first_token(run, engine, folder, monkeypatch):
    def interrupted(args, request):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load_model", interrupted)
    assert run("generate", folder, "--prompt", "a") == (130, "", "musejax: interrupted\n")


def test_new_tokens_are_cut_to_the_context(run, engine, folder):
    room = MINI.max_position_embeddings - 4000
    ids = " ".join(["5"] * 4000)
    _, _, err = run("generate", folder, "--prompt-ids", ids, "--max-new-tokens", "1000")
    assert engine.request.max_new_tokens == room and f"the context has room for {room} new tokens, not 1000" in err


def test_interrupt_that_is_only_noticed_between_tokens(run, engine, folder, monkeypatch):
    """SIGINT raises nowhere: the token that is under way is kept, and the old handler comes back."""
    stream, old = engine.stream, signal.getsignal(signal.SIGINT)

    def interrupted(model, request):
        for made, token in enumerate(stream(model, request)):
            if made == 2:
                signal.raise_signal(signal.SIGINT)
            yield token

    monkeypatch.setattr(generate, "start_stream", interrupted)
    code, out, _ = run("generate", folder, "--prompt", "a", "--json", "--quiet")
    result = json.loads(out)
    assert (code, result["finish_reason"], result["generated_tokens"]) == (130, "interrupt", 3)
    assert signal.getsignal(signal.SIGINT) is old


def test_interrupt_while_loading(run, engine, folder, monkeypatch):
    monkeypatch.setattr(generate, "load_model", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run("generate", folder, "--prompt", "a", "--quiet") == (130, "", "musejax: interrupted\n")


def test_warnings_are_one_line(run, engine, folder, monkeypatch):
    def load(args, request):
        for text in ("gates rounded", "gates rounded", "other"):
            warnings.warn(text, stacklevel=1)
        return engine.load(args, request)

    monkeypatch.setattr(generate, "load_model", load)
    assert run("generate", folder, "--prompt", "a", "--quiet")[2] == (
        "musejax: warning: gates rounded\nmusejax: warning: other\n")


def test_default_checkpoint(run, engine, folder, monkeypatch):
    monkeypatch.setattr("musejax.paths.nano_path", lambda: folder)
    assert run("generate", "--prompt", "a")[0] == 0 and engine.request.path == folder


# ------------------------------------------------------------------ refusals, before anything is loaded


@pytest.mark.parametrize("options, message", [
    (["--max-new-tokens", "0"], "--max-new-tokens: expected an integer of at least 1, got '0'"),
    (["--temperature", "-1"], "--temperature: expected a finite number of at least 0"),
    (["--temperature", "nan"], "--temperature: expected a finite number"),
    (["--temperature", "inf"], "--temperature: expected a finite number"),
    (["--top-p", "0"], "--top-p: expected a number above 0 and at most 1, got '0'"),
    (["--top-p", "1.5"], "--top-p: expected"),
    (["--top-k", "-1"], "--top-k: expected an integer of at least 0"),
    (["--seed", "4294967296"], "--seed: expected an integer of 0 to 4294967295"),
    (["--stop", ""], "--stop: expected at least one character"),
    (["--prefill-chunk", "0"], "--prefill-chunk: expected an integer of at least 1"),
    (["--devices", "3"], "--devices: invalid choice: 3"),
    (["--policy", "fast"], "--policy: invalid choice: 'fast'"),
    (["--combine", "tree"], "combine: expected 'flat' or 'ep(R)' such as 'ep(8)', got 'tree'"),
    (["--combine", "ep(3)"], "combine: ep(3) needs num_local_experts to be a multiple of 3, got 16; use flat"),
    (["--overlay", "nowhere"], "--overlay nowhere: expected a folder"),
    (["--prompt-file", "x"], "not allowed with argument"),
    (["--prompt-ids", "1 b"], "expected token ids such as '1 2 3', got '1 b'"),
    (["--system", "s"], "--system: expected --chat beside it"),
    (["--chat", "--date", "today"], "expected an ISO date"),
    (["--frobnicate"], "unrecognized arguments: --frobnicate"),
])
def test_wrong_options(run, engine, folder, options, message):
    refused(run("generate", folder, "--prompt", "a", *options), message)
    assert engine.request is None


@pytest.mark.parametrize("options, stdin, message", [
    (["--prompt", ""], None, "--prompt: expected a prompt, got nothing"),
    (["--prompt-ids", ""], None, "--prompt-ids: expected a prompt, got nothing"),
    ([], b"\n", "stdin: expected a prompt, got nothing"),
    ([], b"a\xff", "stdin: expected UTF-8 text, got invalid start byte at byte 1"),
    (["--prompt", "\udcff"], None, "text: expected valid Unicode"),
    (["--prompt-file", "nowhere.txt"], None, "nowhere.txt: No such file or directory"),
    (["--prompt-file", "."], None, ".: Is a directory"),
    (["--prompt-ids", "1 512"], None, "prompt: expected token ids below 512 (vocab_size), got 512"),
    (["--prompt-ids", "1 " * 4096], None, "expected fewer than 4096 tokens (max_position_embeddings), got 4096"),
    (["--prompt", "a" * 5000], None, "expected fewer than 4096 tokens"),
    (["--chat", "--prompt-ids", "1"], None, "--chat: expected a prompt as text"),
])
def test_wrong_prompts(run, engine, folder, options, stdin, message):
    refused(run("generate", folder, *options, stdin=stdin), message)
    assert engine.request is None


def test_too_few_devices(run, engine, folder, monkeypatch):
    monkeypatch.setattr("jax.devices", lambda: [SimpleNamespace(platform="cpu")])
    refused(run("generate", folder, "--prompt", "a", "--devices", "8"), "with --platform cpu, --devices 8 makes 8")


def test_no_gpu(run, engine, folder, monkeypatch):
    def devices(platform=None):
        raise RuntimeError("Unknown backend: 'gpu'")

    monkeypatch.setattr("jax.devices", devices)
    refused(run("generate", folder, "--prompt", "a", "--platform", "gpu"), "--platform gpu: expected a GPU")


def test_no_prompt_on_a_terminal(run, engine, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    refused(run("generate", folder), "expected a prompt: --prompt TEXT")


def test_wrong_folders(run, engine, folder, tmp_path):
    def attempt(*options):
        return run("generate", folder, "--prompt", "a", *options)

    refused(run("generate", "What is 2+2?"), "expected a checkpoint folder, found nothing (a prompt goes to --prompt)")
    refused(run("generate", folder / "config.json", "--prompt", "a"), "expected a checkpoint folder, found a file")
    refused(run("generate", tmp_path, "--prompt", "a"), "(published), found none")
    (folder / "chat_template.jinja").unlink()
    refused(attempt("--chat"), "expected the checkpoint's chat template")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    refused(attempt(), "chat_template.jinja: expected UTF-8")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"bos_token": 5}')
    refused(attempt(), "tokenizer_config.json: bos_token: expected a string")
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text("{")
    refused(attempt(), "generation_config.json: expected JSON")
    (folder / "tokenizer.json").write_text("{")
    refused(attempt(), "tokenizer.json: expected a file of the `tokenizers` library")
    (folder / "tokenizer.json").unlink()
    refused(attempt(), "text needs tokenizer.json, found none; give token ids: --prompt-ids '1 2 3'")
    refused(run("generate", folder, "--prompt-ids", "1", "--stop", "a"), "and no --stop")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refused(attempt(), "model_type: expected one of muse_spark")
    (folder / "config.json").unlink()
    refused(attempt(), "expected the published config.json, found no such file")


def test_tokenizer_of_another_model(run, engine, folder):
    small = {**MINI.to_hf()["text_config"], "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(small))
    refused(run("generate", folder, "--prompt", "a"), "tokenizer.json: expected at most 256 tokens (vocab_size)")


@pytest.mark.parametrize("argv, message", [
    ([], "arguments are required: COMMAND"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    (["convert", "nowhere", "out"], "nowhere: expected a checkpoint folder, found nothing"),
    (["convert", "only-one"], "arguments are required: DST"),
    (["info", "nowhere"], "expected a checkpoint folder or one of released, mini, nano, found neither"),
    (["check", "nowhere"], "nowhere: expected a checkpoint folder, found nothing"),
    (["check", "."], "expected golden values of this checkpoint, found no such file"),
])
def test_wrong_commands(run, argv, message):
    result = run(*argv)
    refused(result, message)
    assert "--prompt" not in result[2], "advice for generate only"


def test_info_after_an_unfinished_conversion(run, tmp_path):
    (tmp_path / "out.converting").mkdir()
    refused(run("info", tmp_path / "out"), "the conversion was not finished (0 parts complete in out.converting)")


def test_folder_with_the_name_of_a_preset(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("info", "nano")[2] == ""
    (tmp_path / "nano").mkdir()
    code, out, err = run("info", "nano")
    assert (code, err) == (0, "musejax: nano is taken as the named configuration; the folder is ./nano\n")
    assert out.startswith("configuration nano")


# ------------------------------------------------------------------ convert, check, errors


def test_convert_passes_its_options_on(run, folder, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("musejax.checkpoint.convert", lambda *args, **options: calls.append((args, options)))
    out = tmp_path / "out"
    assert run("convert", folder, out) == (0, "", f"musejax: wrote {out}\n")
    assert run("convert", folder, out, "--overlay", folder, "--quiet", "--overwrite") == (0, "", "")
    assert calls == [((folder, out), {"overlay": (), "progress": True, "overwrite": False}),
                     ((folder, out), {"overlay": (str(folder),), "progress": False, "overwrite": True})]


@pytest.mark.parametrize("passed", [True, False])
def test_check(run, folder, monkeypatch, passed):
    def fake(path, *, overlay, expected, report):
        assert (path, overlay, expected) == (folder, (), folder / "expected.npz")
        report("a line")
        return [SimpleNamespace(passed=passed)]

    (folder / "expected.npz").touch()
    monkeypatch.setattr("musejax.check.run", fake)
    monkeypatch.setattr("musejax.check.to_json", lambda rows: {"passed": passed})
    last = "1 comparisons passed" if passed else "1 of 1 comparisons failed"
    assert run("check", folder) == (1 - passed, f"a line\n{last}\n", "")
    assert run("check", folder, "--json")[:2] == (1 - passed, json.dumps({"passed": passed}) + "\n")


def test_bugs_are_not_hidden(run, engine, folder, monkeypatch):
    """An error that this package did not raise on purpose keeps its traceback."""
    def bug(args, request):
        raise ValueError("shapes differ")

    monkeypatch.setattr(generate, "load_model", bug)
    with pytest.raises(ValueError, match="shapes differ"):
        run("generate", folder, "--prompt", "a")


# ------------------------------------------------------------------ in a process of its own


def command(*argv, **options):
    return subprocess.Popen([sys.executable, "-m", "musejax.cli", *map(str, argv)], stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, **options)


def test_help_and_version_do_not_wait_for_jax():
    for option in ("--help", "--version"):
        start = time.perf_counter()
        out, err = command(option).communicate(timeout=60)
        seconds = time.perf_counter() - start
        assert "musejax" in out and err == ""
        assert seconds < 0.5 * max(1, os.getloadavg()[0]), "on a busy machine it takes longer"
    code = "import sys, musejax.cli as c; c.build_parser().format_help(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_reader_that_leaves():
    """As with `| head -1`: no traceback."""
    process = command("info", "mini")
    process.stdout.close()
    assert process.wait(timeout=60) == cli.READER_GONE
    assert process.stderr.read() == ""


@pytest.mark.parametrize("argv", [["info", "released"], ["--help"]])
def test_output_that_cannot_be_written(argv):
    code = f"import sys, musejax.cli as c; sys.exit(c.run({argv}))"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    for redirection, message in ((">/dev/full", "output cannot be written: No space left on device"),
                                 (">&-", "standard output is closed: expected a file, a pipe or a terminal")):
        done = subprocess.run(["sh", "-c", f'"$0" -P -c "$1" {redirection}', sys.executable, code],
                              stderr=subprocess.PIPE, text=True, env=env)
        assert (done.returncode, done.stderr) == (2, f"musejax: error: {message}\n")


@pytest.fixture
def endless(repo, tmp_path):
    """nano without anything that ends a text: its output is ids, as they come."""
    path = tmp_path / "endless"
    path.mkdir()
    for file in (repo / "checkpoints" / "nano").iterdir():
        if file.suffix in (".json", ".safetensors") and not file.name.startswith("tokenizer"):
            (path / file.name).symlink_to(file)
    for name in ("generation_config.json", "config.json"):
        (path / name).unlink()
    (path / "generation_config.json").write_text('{"eos_token_id": []}')
    config = json.loads((repo / "checkpoints" / "nano" / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 32768  # at a millisecond a token, its own 1,024 end too soon
    (path / "config.json").write_text(json.dumps(config))
    return path


def interruptible(*argv, **env):
    """A command in its own process, which says "ready" on stdout when the console script begins."""
    code = "import sys, musejax.cli as c; print('ready', flush=True); sys.exit(c.run(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, argv)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | env, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert process.stdout.readline() == "ready\n"
    return process


ENDLESS = ("--prompt-ids", "1 2 3", "--max-new-tokens", "30000")


@pytest.mark.parametrize("delay", [0.05, 0.3, 0.8])
def test_sigint_at_the_start(endless, delay):
    process = interruptible("generate", endless, *ENDLESS)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "musejax: " in err


@pytest.mark.slow
def test_sigint_while_compiling(endless):
    process = interruptible("generate", endless, *ENDLESS, JAX_LOG_COMPILES="1")
    read = ""
    while "Compiling" not in read or "step" not in read.rpartition("Compiling")[2]:
        line = process.stderr.readline()
        assert line, read
        read += line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in read + err and "finish: interrupt" in err


@pytest.mark.slow
def test_sigint_while_decoding(endless):
    process = interruptible("generate", endless, *ENDLESS)
    begin = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "finish: interrupt" in err
    ids = (begin + out).split()
    assert f"generated {len(ids)} tokens" in err and (begin + out).endswith("\n")


def test_second_sigint_leaves_at_once(endless):
    process = interruptible("generate", endless, *ENDLESS, JAX_LOG_COMPILES="1")
    read = line = process.stderr.readline()
    while "Compiling" not in line:
        line = process.stderr.readline()
        assert line, read  # the process has ended
        read += line
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err


def test_sigint_after_the_work_is_done():
    """The exit code stays that of the work while Python and its libraries are torn down."""
    code = ("import atexit, sys, time, musejax.cli as c\n"
            "atexit.register(lambda: (print('teardown', flush=True), time.sleep(1)))\n"
            "sys.exit(c.run(sys.argv[1:]))")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "info", "nano"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    for line in process.stdout:
        if line == "teardown\n":
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""


def test_sigint_in_convert_and_check(shared, tmp_path):
    source, out = shared / "data" / "hf_mini", tmp_path / "out"
    for argv in (("convert", source, out), ("check", source)):
        for delay in (0.2, 1.5):
            process = interruptible(*argv)
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert "Traceback" not in err and process.returncode in (130, 0), "0: it was faster"
    assert cli.main(["convert", str(source), str(out), "--quiet", "--overwrite"]) == 0
    assert cli.main(["info", str(out)]) == 0


@pytest.mark.slow
def test_first_token_of_the_fixture(run, shared):
    """The real engine: greedy choice after the golden prompt is the golden arg-max."""
    import numpy as np

    path = shared / "data" / "hf_tiny"
    with np.load(path / "expected.npz") as golden:
        prompt, logits = golden["input_ids"], golden["logits_fp32"]
    code, out, err = run("generate", path, "--prompt-ids", " ".join(map(str, prompt)), "--max-new-tokens", "1",
                         "--policy", "exact", "--combine", "flat", "--json")
    assert code == 0, err
    assert json.loads(out)["token_ids"] == [int(logits[-1].argmax())]
