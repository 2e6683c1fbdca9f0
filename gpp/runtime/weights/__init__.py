"""Weight policies on tensors: which values a stage's parameters have in which pass (`gpp.weights` says it in numbers)."""
