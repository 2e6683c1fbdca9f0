"""Passes and messages in a type narrower than the model's own, and the scale of the loss that float16 needs (`engine.autocast`)."""
