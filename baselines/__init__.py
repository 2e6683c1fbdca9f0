"""Engines of others under this project's harness: same data, weights, optimizer, metrics and files as `engine=distributed`."""
