"""What shows runs: the screen, tables, pages, pictures of curves, trackers.

It knows `base`, reads records, and knows no training. Begin with `progress.py` or
`reporting/run_data.py`.
"""
