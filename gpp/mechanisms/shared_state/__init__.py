"""Optimizer's state and gradients that the replicas of a stage share: each keeps a part of them (`optimizer.shard=replicas`)."""
