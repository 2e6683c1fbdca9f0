"""The tables and figures of papers, and the models that only they need. It is no part of a wheel."""
