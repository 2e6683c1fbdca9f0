"""A backward in two halves: gradients of a stage's inputs at once, those of its weights when they are asked for.

No stage has a value of it: the schedule says that backwards are split (`Holding.parts`), and the mechanism acts where a program has
its kinds of actions.
"""
