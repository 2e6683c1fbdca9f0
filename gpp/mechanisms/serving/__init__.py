"""Streams of requests through a pipeline that trains nothing: mode=inference (EdgePipe)."""
