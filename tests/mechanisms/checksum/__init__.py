"""A mechanism in test code alone: the sum of all gradients of a step, sent to the first stage before the update."""
