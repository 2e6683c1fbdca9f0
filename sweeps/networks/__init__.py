"""Networks that published tables need (`sweeps/model/`), and those that are no chain of layers (docs/zoo.md)."""
