"""HOW does one photograph become many? What TensorFlow's CIFAR-10 tutorial does to an image.

Called by the demo cifar10 and examples. Must never draw from a generator that it was not given.
"""

import numpy as np
import numpy.typing as npt

CROP = 24  # of 32: what the network sees
BRIGHTNESS = 63.0  # at most so much is added, of 255
CONTRAST = (0.2, 1.8)

Images = npt.NDArray[np.uint8]  # (number, 3, height, width)
Pixels = npt.NDArray[np.float32]


def distorted(images: Images, generator: np.random.Generator, crop: int = CROP) -> Pixels:
    """For training: a random piece of each image, perhaps mirrored, of another brightness and contrast, whitened.

    >>> distorted(np.zeros((2, 3, 32, 32), np.uint8), np.random.default_rng(0)).shape
    (2, 3, 24, 24)
    """
    count, _, height, width = images.shape
    top = generator.integers(0, height - crop + 1, count)
    left = generator.integers(0, width - crop + 1, count)
    pieces = np.lib.stride_tricks.sliding_window_view(images, (crop, crop), axis=(2, 3))
    seen = pieces[np.arange(count), :, top, left].astype(np.float32)
    is_mirrored = generator.random(count) < 0.5
    seen[is_mirrored] = seen[is_mirrored, :, :, ::-1]
    seen += generator.uniform(-BRIGHTNESS, BRIGHTNESS, (count, 1, 1, 1)).astype(np.float32)
    factor = generator.uniform(*CONTRAST, (count, 1, 1, 1)).astype(np.float32)
    mean = seen.mean(axis=(2, 3), keepdims=True)  # of each colour, as TensorFlow has it
    return whitened((seen - mean) * factor + mean)


def centred(images: Images, crop: int = CROP) -> Pixels:
    """For testing: the middle of each image, whitened."""
    top, left = (images.shape[2] - crop) // 2, (images.shape[3] - crop) // 2
    return whitened(images[:, :, top : top + crop, left : left + crop].astype(np.float32))


def whitened(images: Pixels) -> Pixels:
    """Each image with mean 0 and deviation 1; one of a single colour becomes 0, and never a division by it.

    >>> float(whitened(np.full((1, 3, 4, 4), 7, np.float32)).max())
    0.0
    """
    mean = images.mean(axis=(1, 2, 3), keepdims=True)
    deviation = images.std(axis=(1, 2, 3), keepdims=True)
    floor = np.float32(1 / np.sqrt(np.prod(images.shape[1:])))
    white: Pixels = (images - mean) / np.maximum(deviation, floor)
    return white
