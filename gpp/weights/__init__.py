"""Which version of its weights a stage uses for which pass, as plain values; `gpp.runtime.weights` carries them out."""
