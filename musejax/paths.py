"""Where files that come with the package lie, installed or in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def nano_path() -> Path:
    """Folder of the small checkpoint `nano`: the installed copy, else the checkout's.

    Raises:
        FileNotFoundError: neither exists.
    """
    return _shipped("nano")


def nano_drafter_path() -> Path:
    """Folder of nano's drafter, likewise."""
    return _shipped("nano_drafter")


def _shipped(name: str) -> Path:
    places = (_PACKAGE / "checkpoints" / name, _PACKAGE.parent / "checkpoints" / name)
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(
        f"expected config.json of the checkpoint {name} in {places[0]} (installed) or {places[1]} (checkout), "
        f"got neither: install again from a checkout that has checkpoints/{name}"
    )
