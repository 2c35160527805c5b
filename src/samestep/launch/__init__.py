"""Ranks: which, where and with whom; how they start, fail, hang and end.

It knows `base`. Only here is `torch.distributed` used to connect. Begin with `ranks/world.py`.
"""
