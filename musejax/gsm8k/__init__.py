"""GSM8K: prompts, answers, scores, acceptance length and the published speed protocol (`musejax gsm8k`).

Data flows one way: `data` (problems) -> `profiles` (prompts) -> `steps` (tokens, as an engine makes them) -> `extract`
and `score` -> `run` (items, one a row) -> `report`. `runfolder` and `echo` keep a run on disk so that it can be
resumed; `speed` times one request. The problems do not come with the package: `--data` or MUSEJAX_GSM8K says where they
lie.
"""
