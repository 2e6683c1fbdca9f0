"""Engines of others under this project's harness.

They have the same data, weights, optimizer, metrics and files as `engine=distributed`."""
