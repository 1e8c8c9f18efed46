"""Does replay matter? Exact sums and sampled answers on tiny models, and what a run makes of them.

``make evidence`` measures what ``data/`` lacks, row by row, and draws the figures of ``docs/why_replay.md``.
"""
