"""A backward in two halves: gradients of a stage's inputs at once, those of its weights when they are asked for."""
