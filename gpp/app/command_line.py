"""The words of this command line, before Hydra composes them."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from gpp.app.several import SEVERAL
from gpp.app.vocabulary import CONF


def flags_of_command() -> argparse.Namespace:
    """`config_dir`, `config_name` and the `words` of this command line that are settings."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    flags, rest = parser.parse_known_args(sys.argv[1:])
    flags.words = [word for word in rest if not word.startswith("-")]
    return flags


def folders() -> tuple[Path, ...]:
    """The folders with groups of options: ours, and the user's."""
    from omegaconf import OmegaConf

    flags = flags_of_command()
    listed = [flags.config_dir] if flags.config_dir else []
    for folder in (*listed, CONF):
        path = Path(folder) / f"{flags.config_name}.yaml"
        try:
            text = path.read_text()
            written = OmegaConf.select(OmegaConf.create(text), "hydra.searchpath") if "searchpath" in text else None
        except Exception:  # it is missing, or no YAML, which composing it has said
            continue
        listed += [entry for entry in written or () if isinstance(entry, str)]
        break
    for word in sys.argv[1:]:
        if match := re.match(r"\+{0,2}hydra\.searchpath=\[(.*)\]$", word):
            listed += [entry.strip("'\" ") for entry in match.group(1).split(",")]
    found = [Path(entry.removeprefix("file://")).resolve() for entry in listed if not entry.startswith("pkg://")]
    return tuple(dict.fromkeys([CONF, *(folder for folder in found if folder.is_dir())]))


def replacing(words: list[str]) -> list[str]:
    """`+experiment=NAME` as `experiment=NAME`, where the configuration has the group: both forms are in use."""
    flags = flags_of_command()
    path = next((path for folder in folders() if (path := folder / f"{flags.config_name}.yaml").is_file()), None)
    # A sweep takes the group over from the configuration that it begins with.
    if path is None or not re.search(
        r"^\s*- (config|(override )?/?experiment:.*)$", path.read_text("utf-8", "replace"), re.MULTILINE
    ):
        return words
    return [word.removeprefix("+") if word.startswith("+experiment=") else word for word in words]


def hold_back(argv: list[str]) -> list[str]:
    """Take `strategy.KEY=VALUE` out of the command line of one comparison.

    They are for the compared strategies that have the setting; Hydra would refuse settings that the default one lacks.
    """
    if not {f"mode={mode}" for mode in SEVERAL} & set(argv) or {"-m", "--multirun"} & set(argv):
        return []
    words = [word for word in argv[1:] if re.match(r"\+{0,2}strategy[./]", word)]
    argv[:] = [word for word in argv if word not in words]
    return words
