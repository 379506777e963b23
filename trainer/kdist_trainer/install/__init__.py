"""Makes an image with Python and torch one that can run the trainer: `python -m
kdist_trainer.install`, an init container of such a pod, installs the trainer and packages into a
folder that the pod's other containers have on their `PYTHONPATH`.

The trainer comes as an archive, which this program runs from: Python imports from it. So this
package imports nothing but the standard library and `kdist_trainer.formats` and `log`, which do
the same.

pip runs in an environment whose packages go to that folder, and which sees those of the image: what
is there, such as torch, is not installed again.
"""
