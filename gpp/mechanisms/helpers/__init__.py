"""Parts of a stage's backward on other devices (LayerPipe)."""
