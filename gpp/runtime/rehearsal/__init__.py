"""Rehearsals: short runs of a plan by the real workers, to time its stages in place."""
