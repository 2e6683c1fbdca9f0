"""The versions of its weights that a stage holds, as the rooms ask of a weight policy; and plain weights, of which there is one."""
