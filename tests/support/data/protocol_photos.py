"""Photos of twelve kinds, for comparisons of the preprocessing with other programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

TRUNCATED = "truncated"
# torchvision and timm drop alpha and EXIF, clip 16-bit pixels, and ignore the transparency of a palette.
DIFFERENT_ON_PURPOSE = ("RGBA", "16-bit", "palette", "EXIF")


def random_photo(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Return a color image with the spectrum of photos: amplitudes fall with the frequency."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    amplitude = 1 / np.maximum(np.hypot(rows, columns), 1 / max(width, height))
    noise = rng.normal(size=(3, height, width))
    channels = np.fft.irfft2(np.fft.rfft2(noise) * amplitude, (height, width))
    # Colors are less saturated than independent channels.
    channels += 2 * channels.mean(0)
    low, high = np.percentile(channels, (2, 98))
    pixels = ((channels - low) / max(high - low, 1e-9) * 255).clip(0, 255)
    return Image.fromarray(pixels.astype(np.uint8).transpose(1, 2, 0).copy())


def write_photos(folder: Path, per_kind: int = 8, seed: int = 0) -> dict[str, list[Path]]:
    """Write `per_kind` photos of each kind, two of the huge ones and eight with EXIF, and return their paths."""
    rng = np.random.default_rng(seed)
    written: dict[str, list[Path]] = {}
    for kind, write in _WRITERS.items():
        count = {"huge": min(per_kind, 2), "EXIF": 8}.get(kind, per_kind)
        stems = [folder / f"{kind.replace(' ', '-').lower()}-{number:02}" for number in range(count)]
        written[kind] = [write(stem, rng, number) for number, stem in enumerate(stems)]
    return written


def _photo(rng: np.random.Generator) -> Image.Image:
    width, height = rng.integers(180, 700, 2)
    return random_photo(rng, int(width), int(height))


def _rgb(stem: Path, rng: np.random.Generator, number: int) -> Path:
    if number % 4 == 3:
        return _save(_photo(rng), stem, ".png")
    return _save(_photo(rng), stem, ".jpg", quality=92, subsampling=number % 4 % 3, progressive=number % 2 == 1)


def _rgba(stem: Path, rng: np.random.Generator, number: int) -> Path:
    image = _photo(rng).convert("RGBA")
    image.putalpha(random_photo(rng, *image.size).convert("L"))
    return _save(image, stem, ".png")


def _cmyk(stem: Path, rng: np.random.Generator, number: int) -> Path:
    return _save(_photo(rng).convert("CMYK"), stem, ".jpg", quality=92)


def _gray(stem: Path, rng: np.random.Generator, number: int) -> Path:
    return _save(_photo(rng).convert("L"), stem, ".png" if number % 2 else ".jpg")


def _sixteen_bit(stem: Path, rng: np.random.Generator, number: int) -> Path:
    shades = np.asarray(_photo(rng).convert("L")).astype(np.uint16) * 257
    return _save(Image.fromarray(shades), stem, ".png")


def _palette(stem: Path, rng: np.random.Generator, number: int) -> Path:
    return _save(_photo(rng).quantize(64), stem, ".png", **({"transparency": 7} if number % 2 else {}))


def _exif(stem: Path, rng: np.random.Generator, number: int) -> Path:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = number + 1
    return _save(_photo(rng), stem, ".jpg", exif=exif)


def _tiny(stem: Path, rng: np.random.Generator, number: int) -> Path:
    width, height = rng.integers(2, 20, 2)
    return _save(random_photo(rng, int(width), int(height)), stem, ".png" if number % 2 else ".jpg")


def _huge(stem: Path, rng: np.random.Generator, number: int) -> Path:
    size = (5200, 3900) if number else (3100, 4700)
    detail = random_photo(rng, size[0] // 4, size[1] // 4)
    return _save(detail.resize(size, Image.Resampling.BICUBIC), stem, ".jpg", quality=85)


def _one_pixel_wide(stem: Path, rng: np.random.Generator, number: int) -> Path:
    length = int(rng.integers(2, 600))
    size = (1, length) if number % 2 else (length, 1)
    return _save(random_photo(rng, *size), stem, ".png" if number % 4 < 2 else ".jpg")


def _webp(stem: Path, rng: np.random.Generator, number: int) -> Path:
    return _save(_photo(rng), stem, ".webp", quality=80, lossless=number % 4 == 3)


def _truncated(stem: Path, rng: np.random.Generator, number: int) -> Path:
    path = _rgb(stem, rng, number)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    return path


def _save(image: Image.Image, stem: Path, suffix: str, **options: object) -> Path:
    path = stem.with_name(stem.name + suffix)
    image.save(path, **options)  # type: ignore[arg-type]
    return path


_WRITERS: dict[str, Callable[[Path, np.random.Generator, int], Path]] = {
    "RGB": _rgb,
    "RGBA": _rgba,
    "CMYK": _cmyk,
    "gray": _gray,
    "16-bit": _sixteen_bit,
    "palette": _palette,
    "EXIF": _exif,
    "tiny": _tiny,
    "huge": _huge,
    "one pixel wide": _one_pixel_wide,
    "WebP": _webp,
    TRUNCATED: _truncated,
}
