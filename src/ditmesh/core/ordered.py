"""Sums with bits that do not depend on which rank computed which part.

The addends have numbers, and are added up along one binary tree over all numbers, on any rank and in whichever
order they come. A rank that has all addends below a node has the node's sum; sums of nodes are exchanged instead of
addends.
"""

from __future__ import annotations

from torch import Tensor

# A node of the tree: the numbers [start, stop) below it.
Node = tuple[int, int]


class OrderedSum:
    """The sum of ``count`` tensors of one shape, along the tree.

    ``nodes``: sums of the largest nodes that are complete.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.nodes: dict[Node, Tensor] = {}

    def add(self, node: Node, value: Tensor) -> None:
        """Take the sum of a node; an addend's node is ``(number, number + 1)``. ``value`` is not written to."""
        if node in self.nodes:
            raise ValueError(f"the sum of the addends {node[0]} to {node[1] - 1} was given twice")
        self.nodes[node] = value
        # Joined with its sibling as soon as both are here.
        while (pair := _siblings(node, self.count)) is not None and all(half in self.nodes for half in pair):
            left, right = (self.nodes.pop(half) for half in pair)
            node = (pair[0][0], pair[1][1])
            self.nodes[node] = left + right

    @property
    def total(self) -> Tensor:
        """The sum of all addends, which all have been taken."""
        return self.nodes[0, self.count]


def nodes_of(numbers: range | set[int], node: Node) -> list[Node]:
    """The largest nodes from ``node`` on with such numbers alone: what an `OrderedSum` of these addends comes to."""
    if all(number in numbers for number in range(*node)):
        return [node]
    return [part for half in _halves(node) for part in nodes_of(numbers, half)] if node[1] - node[0] > 1 else []


def _halves(node: Node) -> tuple[Node, Node]:
    start, stop = node
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    return (start, middle), (middle, stop)


def _siblings(node: Node, count: int) -> tuple[Node, Node] | None:
    """The node and the other half of its parent, in order; None at the root."""
    parent = (0, count)
    while parent != node:
        pair = _halves(parent)
        if node in pair:
            return pair
        parent = pair[0] if node[1] <= pair[0][1] else pair[1]
    return None
