"""Checkpoints: how a training's state reaches the disk whole or not at all, and how it comes back
verified.
"""
