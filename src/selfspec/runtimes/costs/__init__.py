"""Costs of forwards: measured on this machine, kept on disk, followed while requests run.

``rows`` has the costs of whole forwards by their number of rows; ``measuring`` measures and ``live`` corrects them by
what rounds take. ``parts`` measures the parts of a forward of one row, ``latencies`` follows them; ``store`` keeps all.
``rows`` and ``live`` are pure numbers and do not import torch.
"""
