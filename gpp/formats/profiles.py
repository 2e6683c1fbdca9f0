"""Profiles that others measured, as operator graphs.

There are three formats, which are told apart by their content: PipeDream's graph.txt, Piper's JSON and plain JSON. One sample of
ours is one micro-batch of the profile. `forward_flops` and `backward_flops` hold *seconds* a sample, which
`gpp.cost.models.tabulated` reads as they are.
"""

from __future__ import annotations

from pathlib import Path

from gpp.errors import InvalidFile, InvalidGraph
from gpp.formats.draft import SETTING
from gpp.formats.pipedream import read_graph_txt
from gpp.formats.piper import is_piper, read_piper
from gpp.formats.plain import read_plain
from gpp.graph.op_graph import OpGraph
from gpp.serialization import read_text


def read_profile(path: str | Path, *, seconds: float = 1.0) -> OpGraph:
    """The operator graph of a profile, operators in a topological order in which the file's order breaks ties.

    Args:
        seconds: length of one unit of Piper's times. Its own ResNet and GNMT files are in milliseconds: 1e-3.

    Raises:
        InvalidFile: the file cannot be read, it has none of the formats, or a field is missing or wrong; names the place.
    """
    path = Path(path)
    text = read_text(path, setting=SETTING)
    if not text.lstrip().startswith("{"):
        draft = read_graph_txt(text, path)
    elif is_piper(text):
        draft = read_piper(text, path, seconds)
    else:
        draft = read_plain(text, path)
    name = path.name.removesuffix(".graph.txt").removesuffix(".json").removesuffix(".txt")
    try:
        return draft.build(name)
    except InvalidGraph as error:
        raise InvalidFile(path, "", str(error).removesuffix("."), "correct the file") from None
