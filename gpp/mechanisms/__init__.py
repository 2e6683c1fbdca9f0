"""The mechanisms: what a stage may do beyond plain passes. Each has one folder, found by `gpp.mechanism`."""
