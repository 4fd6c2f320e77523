"""Attention, cache, norm, rotary and sampling kernels, one interface over several backends."""
