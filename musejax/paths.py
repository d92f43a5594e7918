"""Where files that come with the package lie, installed or in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def nano_path() -> Path:
    """Folder of the small checkpoint `nano`: the installed copy, else the checkout's.

    Raises:
        FileNotFoundError: neither exists.
    """
    places = (_PACKAGE / "checkpoints" / "nano", _PACKAGE.parent / "checkpoints" / "nano")
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(
        f"expected config.json of the checkpoint nano in {places[0]} (installed) or {places[1]} (checkout), "
        "got neither: install again from a checkout that has checkpoints/nano"
    )
