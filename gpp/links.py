"""Links between devices: what one is, pairs that have their own, and who has which. SI units throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from operator import ne
from typing import TypeVar

from gpp.errors import InvalidConfig
from gpp.settings import Natural, NotNegative, Positive, settings

T = TypeVar("T")


@settings("cluster.link")
class Link:
    """An alpha-beta link: a message of n bytes takes `latency_s + n / bandwidth_bytes_per_s`.

    Args:
        over_host: whether its messages go over the links of both devices to their hosts, where copies of activations go, too.
    """

    latency_s: NotNegative
    bandwidth_bytes_per_s: Positive
    over_host: bool = False

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds from the start of a send to the arrival of its last byte."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    def at_most(self, *rates: float | None) -> Link:
        """This link at the slowest of its own rate and these, in bytes per second; None is no limit."""
        rate = min([self.bandwidth_bytes_per_s, *(rate for rate in rates if rate is not None)])
        return self if rate == self.bandwidth_bytes_per_s else replace(self, bandwidth_bytes_per_s=rate)


@settings("cluster.links")
class PairLink:
    """The link of one pair of devices, or of every device of one type with every other one of another, in both directions.

    Args:
        between: the numbers of two devices, or the names of two types (`Device.name`), which may be one and the same.
        link: takes the place of the one between their nodes; the devices' own rates do not limit it.
    """

    between: tuple[Natural, Natural] | tuple[str, str]
    link: Link

    @property
    def numbers(self) -> tuple[int, int] | None:
        """The two devices, ascending; None where the pair is one of types."""
        a, b = self.between
        return (min(a, b), max(a, b)) if isinstance(a, int) and isinstance(b, int) else None


@dataclass(frozen=True)
class Wiring:
    """Which link two devices have: `Cluster.wiring`.

    Args:
        nodes, names, rates: of every device its node, the name of its type and the rate of its own link, in bytes per second.
        intra_node: between two devices of one node; inter_node: of two nodes; a device's own rate limits both.
        network_cards: of every node; each has the rate of `inter_node`.
        pairs: what goes before that; a pair of devices goes before a pair of types.
    """

    nodes: tuple[int, ...]
    names: tuple[str | None, ...]
    rates: tuple[float | None, ...]
    intra_node: Link
    inter_node: Link
    network_cards: int
    pairs: tuple[PairLink, ...]

    def check(self) -> None:
        """Refuse pairs of what the cluster does not have, or that are there twice.

        Raises:
            InvalidConfig: names the pair.
        """
        known = sorted({name for name in self.names if name is not None}) if self.pairs else []
        seen: set[frozenset[int | str]] = set()
        for i, pair in enumerate(self.pairs):
            setting, pair_is, ends = f"cluster.links[{i}].between", list(pair.between), frozenset(pair.between)
            if ends in seen:
                rule = "a pair has one link, in both directions, and this one is there twice"
                raise InvalidConfig(setting, pair_is, rule, "leave one of the two out")
            seen.add(ends)
            if pair.numbers is not None:
                if len(ends) == 1:
                    raise InvalidConfig(setting, pair_is, "a device has no link to itself", "name two devices")
                if pair.numbers[1] >= len(self.nodes):
                    rule = f"devices have numbers from 0 to {len(self.nodes) - 1}"
                    raise InvalidConfig(setting, pair_is, rule, "name two of them, or add devices")
            elif missing := [name for name in pair.between if name not in known]:
                rule = f"no device has the name {missing[0]}; the names of devices are: {', '.join(known) or 'none'}"
                raise InvalidConfig(setting, pair_is, rule, "name a type as devices do (cluster.device.name)")

    @cached_property
    def by_node(self) -> tuple[Link, Link] | None:
        """The links inside and between nodes, where no device and no pair has another one; else None."""
        own = set(self.rates)
        return None if self.pairs or len(own) > 1 else (self.intra_node.at_most(*own), self.inter_node.at_most(*own))

    def link(self, a: int, b: int) -> Link:
        """The link between two different devices, the same in both directions."""
        if self.by_node is not None:
            return self.by_node[self.nodes[a] != self.nodes[b]]
        pair = (a, b) if a < b else (b, a)
        if pair not in self._numbered:
            nodes = self.intra_node if self.nodes[a] == self.nodes[b] else self.inter_node
            named = self._named.get(frozenset((self.names[a], self.names[b])))
            self._numbered[pair] = named or nodes.at_most(self.rates[a], self.rates[b])
        return self._numbered[pair]

    def between(self, some: Sequence[int], others: Sequence[int]) -> tuple[Link, ...]:
        """The links, each once, between a device of one group and another one of the other.

        Where nodes alone decide, groups that share a device have the link inside its node, even if they have no other there.
        """
        if self.by_node is None:
            found = (self.link(a, b) for a, b in product(self._told_apart(some), self._told_apart(others)) if a != b)
            return _once(found)
        # By node, as planners ask for many pairs of large groups.
        inside, across = self.by_node
        mine, theirs = {self.nodes[d] for d in some}, {self.nodes[d] for d in others}
        return (inside,) * bool(mine & theirs) + (across,) * (len(mine | theirs) > 1)

    @cached_property
    def every(self) -> tuple[Link, ...]:
        """The links, each once, that any two devices have; none where there is one device."""
        if self.by_node is None:
            return _once(self.link(a, b) for a, b in combinations(self._told_apart(range(len(self.nodes))), 2))
        inside, across = self.by_node
        nodes = len(set(self.nodes))
        return (inside,) * (nodes < len(self.nodes)) + (across,) * (nodes > 1)

    @cached_property
    def means(self) -> tuple[Link, Link]:
        """The mean links inside and between nodes, for whoever knows only these two; as they are where nodes alone decide.

        A mean has the mean latency, and the rate at which equal messages over all pairs take as long as they do.
        """
        if self.by_node is not None:
            return self.by_node
        pairs = {True: list[Link](), False: list[Link]()}
        for a, b in combinations(range(len(self.nodes)), 2):
            pairs[self.nodes[a] == self.nodes[b]].append(self.link(a, b))
        return mean(pairs[True]) or self.intra_node, mean(pairs[False]) or self.inter_node

    @cached_property
    def common(self) -> Link:
        """The link for whoever counts with one: inside the node where there is one node, else between nodes."""
        return self.means[len(set(self.nodes)) > 1]

    @cached_property
    def mean_rates(self) -> tuple[float, ...]:
        """Of every device the mean rate of its links, in bytes per second; of `common` where nodes alone decide."""
        count = len(self.nodes)
        if self.by_node is not None or count == 1:
            return (self.common.bandwidth_bytes_per_s,) * count
        own = [[1 / self.link(a, b).bandwidth_bytes_per_s for b in range(count) if a != b] for a in range(count)]
        return tuple((count - 1) / sum(each) for each in own)

    def widest(self, count: int) -> float:
        """The rate, in bytes per second, that no all-reduce over so many devices, two at least, exceeds on its slowest link."""
        cards = self._most_cards(count)
        if self.by_node is not None:
            inside, across = (link.bandwidth_bytes_per_s for link in self.by_node)
            nodes = set(self.nodes)
            fits = count <= max(self.nodes.count(node) for node in nodes)
            # Several cards are those of several devices of a node, which have links inside it.
            over = max(across, min(inside, cards * across)) if cards > 1 else across
            return max([inside] * fits + [over] * (len(nodes) > 1))
        # Links join devices to groups, the fastest first; a ring lies within one group.
        group = {d: [d] for d in range(len(self.nodes))}
        rates = {
            (a, b): self.link(a, b).bandwidth_bytes_per_s * (cards if self.nodes[a] != self.nodes[b] else 1)
            for a, b in combinations(group, 2)
        }
        for a, b in sorted(rates, key=lambda pair: -rates[pair]):
            if group[a] is not group[b]:
                group[a] += group[b]
                group.update(dict.fromkeys(group[b], group[a]))
                if len(group[a]) >= count:
                    return rates[a, b]
        raise AssertionError("the cluster has so many devices")

    @cached_property
    def best(self) -> Link:
        """No message is faster than over this: the least latency and the largest rate of all links.

        One device alone has none; there it is the link inside a node.
        """
        links = self.every or (self.intra_node,)
        return Link(
            latency_s=min(link.latency_s for link in links),
            bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in links),
        )

    def ring(self, devices: tuple[int, ...]) -> Sequence[tuple[Link, int]]:
        """The kinds of links in a ring over devices, in order, and how many of each carry its bytes at once.

        The link of the last device to the first is one of them. Between nodes the bytes go over several cards: `cards`.
        """
        nodes = [self.nodes[device] for device in devices]
        apart = list(map(ne, nodes, (*nodes[1:], nodes[0])))
        cards = self.cards(devices) if any(apart) else 1
        if self.by_node is None:
            pairs = zip(devices, (*devices[1:], devices[0]), strict=True)
            return _once((self.link(*pair), cards if over else 1) for pair, over in zip(pairs, apart, strict=True))
        inside, across = self.by_node
        # Who sends over several cards has several devices in every node, however they are listed.
        return [(inside, 1)] * (cards > 1 or not all(apart)) + [(across, cards)] * any(apart)

    def cards(self, devices: Sequence[int]) -> int:
        """Network cards of a node over which devices of several nodes send at once: the least that a node has for them.

        A node's devices share its cards evenly, as other groups of them communicate, too. So a group has its devices' part of the
        cards: one at least, and never more than one for each device.
        """
        if self.network_cards == 1:
            return 1
        members = Counter(self.nodes[device] for device in devices)
        return min(_part(self.network_cards, count, self._sizes[node]) for node, count in members.items())

    def _most_cards(self, count: int) -> int:
        """No group of so many devices in several nodes has more cards."""
        largest = max(self._sizes.values())
        # The fewest nodes leave the node with the fewest of the devices the most.
        fewest = count // max(2, -(-count // largest))
        return max(_part(self.network_cards, min(fewest, size), size) for size in self._sizes.values())

    @cached_property
    def _sizes(self) -> Counter[int]:
        """The devices of every node."""
        return Counter(self.nodes)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """For every device the first one whose place it could take: in its node, with the same link to every other device.

        Devices of one place may still differ in speed and memory.
        """
        if self.by_node is not None:
            first = {node: device for device, node in reversed([*enumerate(self.nodes)])}
            return tuple(first[node] for node in self.nodes)
        out: list[int] = []
        for a in range(len(self.nodes)):
            out.append(next((b for b in dict.fromkeys(out) if self._same_place(a, b)), a))
        return tuple(out)

    def _same_place(self, a: int, b: int) -> bool:
        others = (c for c in range(len(self.nodes)) if c not in (a, b))
        return self.nodes[a] == self.nodes[b] and all(self.link(a, c) == self.link(b, c) for c in others)

    def _told_apart(self, devices: Iterable[int]) -> list[int]:
        """Of devices that `link` cannot tell apart two, as those have a link between them, too."""
        numbered = {number for pair in self.pairs for number in pair.numbers or ()}
        groups: dict[tuple[object, ...], list[int]] = {}
        for d in devices:
            groups.setdefault((self.nodes[d], self.names[d], self.rates[d], d if d in numbered else None), []).append(d)
        return [d for group in groups.values() for d in group[:2]]

    @cached_property
    def _numbered(self) -> dict[tuple[int, int], Link]:
        """Two devices, ascending -> their link; filled as it is asked for."""
        return {pair.numbers: pair.link for pair in self.pairs if pair.numbers is not None}

    @cached_property
    def _named(self) -> dict[frozenset[int | str | None], Link]:
        """The names of two types -> their link."""
        return {frozenset(pair.between): pair.link for pair in self.pairs if pair.numbers is None}


def mean(links: Collection[Link]) -> Link | None:
    """The mean latency and the harmonic mean of the rates; None of no link."""
    if not links:
        return None
    return Link(
        latency_s=sum(link.latency_s for link in links) / len(links),
        bandwidth_bytes_per_s=len(links) / sum(1 / link.bandwidth_bytes_per_s for link in links),
        over_host=all(link.over_host for link in links),
    )


def _part(cards: int, count: int, size: int) -> int:
    """Cards of a node that so many of its devices have: their part of them, one at least and at most one for each."""
    return max(1, min(cards, size) * count // size)


def _once(links: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(links))
