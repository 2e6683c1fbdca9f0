"""Messages between stages whose values have fewer bits (EdgePipe, QuantPipe)."""
