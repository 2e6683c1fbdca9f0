"""Tensor parallelism: several devices share one replica of a stage, each with a part of every operator (Megatron-LM, section 3)."""
