"""The PTX instructions that numba lacks, one Python name each.

arithmetic: bits, bytes and halves; memory: loads and stores of a given width and order; tensor: matrix fragments;
asynchronous: copies that land later; barriers: named barriers and dependent launch.
"""
