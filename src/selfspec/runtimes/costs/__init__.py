"""Costs of forwards: measured on this machine, kept on disk, followed while requests run.

``rows`` has whole forwards by their number of rows, ``parts`` the parts of a forward of one row, ``live`` corrects both
by what rounds take, ``store`` keeps them.
"""
