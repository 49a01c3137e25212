"""What published bandwidths and peaks predict for the papers' models; nothing here is measured."""

from selfspec_lab.roofline.devices import DEVICES, Device, find_device
from selfspec_lab.roofline.shapes import MODELS, ModelShape, find_shape, shape_of
from selfspec_lab.roofline.step import STORED_BITS, Work, forward_work, step_seconds

__all__ = [
    "DEVICES",
    "MODELS",
    "STORED_BITS",
    "Device",
    "ModelShape",
    "Work",
    "find_device",
    "find_shape",
    "forward_work",
    "shape_of",
    "step_seconds",
]
