"""What each mechanism has outside its folder: files of the core that name it."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from tests.support.pages import ROOT

WORDS: Final = {
    "helpers": r"weight_device|input_share|\bhelpers?\b|\bhelped\b",
    "marks": r"recomput|[Oo]ffload|planner\.marks|marks: ClassVar",
    "precision": r"[Aa]utocast|[Ll]oss[ _]?[Ss]cale|LossScale|overflowed",
    "quantised_edges": r"[Qq]uantis|edge_(bits|clip|auto)|(most|useful)_bits",
    "round_robin": r"[Rr]ound[ _-]?[Rr]obin|1F1B-RR|replicas( that)? take (turns|whole)",
    "serving": (r"\bserv(es|ed|ing)\b|Serving|Serve[A-Z]|\brequests\b|\bArrivals\b|arrival_rate|inference\"|=inference|EdgePipe"),
    "shared_state": r"ZeRO\b|optimizer\.shard|\bshard:|shares?_state|state_share|[Ss]hare[sd]? (the|their) (optimizer's )?state",
    "split_backward": (
        r"split_backward|INPUT_GRADIENTS|WEIGHT_GRADIENTS|HALVES|split(s|ting)? (a |the |their )?backwards?\b"
        r"|backwards?( that)? (is|are|be) split|hal(f|ves) of (a|the|its|their) backwards?"
    ),
    "tensor_parallel": r"[Tt]ensor[ _-]parallel",
    "weight_versions": (
        r"\b_?stash|[Dd]ouble_?[Bb]uffer|[Ss]pec_?[Tt]rain|[Pp]ipe_?[Mm]are|[Pp]ipe_?[Oo]ptim|[Vv]ertical_?[Ss]ync|\b[Nn]aive\b"
        r"|[Pp]redictor|[Pp]redict(s|ed|ing)? (the )?weights|weights?[/._]correction|\b[Cc]orrections?\b"
    ),
}
"""By mechanism: the words of its settings and fields, and what its papers call things."""


@cache
def core() -> dict[str, str]:
    """The texts of the core by path below gpp/: without mechanisms and the list of public names, where a user finds theirs."""
    files = sorted((ROOT / "gpp").rglob("*.py"))
    texts = {str(path.relative_to(ROOT / "gpp")): path.read_text() for path in files}
    return {name: text for name, text in texts.items() if not name.startswith("mechanisms/") and name != "__init__.py"}


def naming(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """By mechanism: the files that have its words. A server of pages has requests of its own."""
    found = {name: {file for file, text in texts.items() if re.search(words, text)} for name, words in WORDS.items()}
    found["serving"] -= {file for file in texts if file.startswith("ui/")}
    return found
