"""PipeDream's graph.txt:

    node4 -- Conv2d(3, 64) -- forward_compute_time=1.2, backward_compute_time=2.4, activation_size=8.0, ...
    <tab>node4 -- node5                                          (milliseconds, bytes)

Nodes called `Input...` without predecessors and `__getitem__...` without successors are left out, as in PipeDream's optimizer:
they compute nothing. An operator has one output of one size, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpp.errors import InvalidFile
from gpp.formats.draft import MOST, ProfileDraft, ProfileNode


def read_graph_txt(text: str, path: Path) -> ProfileDraft:
    """The profile in a graph.txt.

    Raises:
        InvalidFile: a line is none of its; names the line.
    """
    nodes: dict[str, ProfileNode] = {}
    edges: list[tuple[str, str]] = []
    sizes: dict[str, float] = {}
    descriptions: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        where = f":{number}"
        if not line.strip():
            continue
        words = line.strip().split(" -- ")
        if line.startswith("\t") or (len(words) == 2 and "=" not in line):
            if len(words) != 2 or words[0] not in nodes or words[1] not in nodes:
                rule = "an edge joins two nodes given above it"
                raise InvalidFile(path, where, rule, "write `node1 -- node2`", value=[line.strip()])
            edges.append((words[0], words[1]))
            continue
        if len(words) < 3:
            raise InvalidFile(
                path,
                where,
                "is neither a node (`id -- description -- forward_compute_time=..`) nor an edge of PipeDream's graph.txt, "
                "and the file is no JSON object",
                "give a graph.txt of PipeDream, a JSON file of Piper, or plain JSON",
                value=[line.strip()],
            )
        if words[0] in nodes:
            raise InvalidFile(path, where, "is given twice", "give each node once", value=[words[0]])
        values = dict(word.split("=", 1) for word in words[2].split(", ") if "=" in word)
        read = {name: _graph_number(values, name, path, where) for name in GRAPH_FIELDS}
        forward, backward, sizes[words[0]], params = read.values()
        descriptions[words[0]] = words[1]
        nodes[words[0]] = ProfileNode(
            f"{words[0]}.{words[1].split('(')[0].strip() or 'op'}", forward / 1e3, backward / 1e3, params, sizes[words[0]]
        )
    edges = list(dict.fromkeys(edges))
    for keyword, end in (("Input", 1), ("__getitem__", 0)):
        with_neighbours = {edge[end] for edge in edges}
        gone = {key for key in nodes if descriptions[key].startswith(keyword) and key not in with_neighbours}
        edges = [edge for edge in edges if not gone & set(edge)]
        nodes = {key: node for key, node in nodes.items() if key not in gone}
    if not nodes:
        raise InvalidFile(path, "", "a profile has at least one operator", "check the file")
    readers = {key: list[str]() for key in nodes}
    for a, b in edges:
        readers[a].append(b)
    return ProfileDraft(path, nodes, [(key, readers[key], sizes[key]) for key in nodes])


GRAPH_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def _graph_number(values: Mapping[str, str], name: str, path: Path, where: str) -> float:
    text = values.get(name)
    if text is None:
        fix = f"give {', '.join(f'{n}=..' for n in GRAPH_FIELDS)}, separated by `, `"
        raise InvalidFile(path, where, f"{name} is missing", fix)
    try:
        # Several outputs are written as [a; b; c].
        amounts = [float(word) for word in text.strip("[]").split("; ")]
    except ValueError:
        raise InvalidFile(path, f"{where} {name}", "must be a number, or [a; b]", "correct the number", value=[text]) from None
    # Not a number is in no range.
    if not all(0 <= amount <= MOST for amount in amounts) or sum(amounts) > MOST:
        raise InvalidFile(path, f"{where} {name}", f"must be at least 0, and at most {MOST:g}", "correct the number", value=[text])
    return sum(amounts)
