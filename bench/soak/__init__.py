"""Trainings that are disturbed again and again for as long as you like, and what they hold and do
meanwhile. Read `scenarios` for what is disturbed, `__main__` for how it is run.
"""
