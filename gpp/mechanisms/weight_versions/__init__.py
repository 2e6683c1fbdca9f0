"""Weights of a pipeline that does not drain: which version of them each pass uses, and what that costs.

A policy is a file of its own beside this; `base.py` says what it declares, and what follows from that. Its corrections are in
`corrections/`, what a worker keeps is in `on_worker/`.
"""
