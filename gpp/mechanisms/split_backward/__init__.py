"""A backward in two halves: gradients of a stage's inputs at once, those of its weights when they are asked for.

A plan's stages carry nothing of it. A schedule asks for it by `holds = Holding(parts=HALVES)` and writes I and W in place of B;
planners reckon with `Holding.parts` (`gpp.cost.holding`), `Plan.late` and `StageCost.weight_s`.
`kinds.py` says what they are, `operators.py` which operators are split, `late.py` how, and `worker.py` how a worker runs them.
"""
