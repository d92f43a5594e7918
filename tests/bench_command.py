"""`musejax bench layer` and `bench step` with canned figures instead of a GPU's."""

from musejax import cli
from musejax.bench import limits

STEADY = limits.Row("hbm.steady", "HBM read", "TB/s", 4.5, 4.4, 4.6, 15, "4.57", "4.98 GB", "ok")


class Library:
    def limits(self, device, groups):
        return [vars(STEADY)] if groups == ["hbm"] else []

    def version(self):
        return "1.2.3"


class BenchCommand:
    """One of the commands.

    Attributes:
        measured: the arguments of every measurement of the last call.
    """

    def __init__(self, capsys, monkeypatch, module, name: str, timing):
        self.capsys, self.name, self.timing, self.measured = capsys, name, timing, []
        monkeypatch.setattr(limits, "open_library", lambda: (Library(), "NVIDIA H200"))
        monkeypatch.setattr(module, "measure", self._measure)

    def _measure(self, *arguments, **more):
        self.measured.append((*arguments, *more.values()))
        return self.figures

    def __call__(self, *argv, timing=None):
        """-> (exit code, stdout, stderr)."""
        self.measured, self.figures = [], timing or self.timing
        return cli.main(["bench", self.name, *map(str, argv)]), *self.capsys.readouterr()


def refused(capsys, name: str, *argv) -> str:
    """Exit code 2 and one message; the message."""
    code = cli.main(["bench", name, *map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("musejax: error: ") and err.count("\n") == 1, (code, out, err)
    return err
