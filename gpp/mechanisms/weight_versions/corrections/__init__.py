"""What is corrected at the update for gradients that are late, as plain values; `gpp.runtime` carries them out."""
