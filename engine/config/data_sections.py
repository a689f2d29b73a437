"""Config sections `data` and `augment`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config.section import ColumnNames, FloatPair, Floats, Section, SizeSchedule, Text, UserCodePath

IMAGE_FILE_DATASETS = ("mnist", "fashion-mnist", "cifar10", "cifar100")
# Encoded image files of any size, decoded when they are loaded; see `engine.train.data.sources.base`.
ENCODED_DATASETS = ("folder", "csv", "webdataset")
# Files with the labels of images.
CSV_SUFFIXES = (".csv", ".tsv")
OTHER_LABELS_ADVICE = (
    "built in are images in one folder per class, and a CSV file with a line image,label for each image; with other "
    "labels, run a script of yours: gputrain run -- python train.py"
)
# Highest magnitude of torchvision's RandAugment.
MAX_POLICY_MAGNITUDE = 30
Fit = Literal["crop", "squash"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "folder", "csv", "webdataset", "fake"]


class DataConfig(Section):
    """Section `data`: dataset and input pipeline."""

    dataset: DatasetName | UserCodePath = Field(
        "digits",
        description="Dataset, such as folder or cifar10. Default: the one that data.path is, else digits. webdataset "
        "has tar shards, such as those of gputrain data pack; fake has random images. User code (module:name) is "
        "called with train, then with val, and with data.path as path if it has that argument; it returns a dataset "
        "of (image, integer label) pairs. Images are PIL images or uint8 arrays, or floating-point tensors (C x H x "
        "W) of any number of channels, which the dataset normalizes. Example: engine/OWN_CODE.md.",
    )
    path: Text | None = Field(
        None,
        title="data path",
        description="Folder or files of the dataset. For csv, the file of labels: a line per image with the path of "
        "its file, relative to the folder of the CSV file (column image), its label, and optionally train, val or test "
        "(column split). For webdataset, the tar shards, such as shards/train-{000..146}.tar, or their folder: there, "
        "the names of those for validation begin with val. Not needed for digits and fake. Without data.dataset, .csv "
        "and .tsv files are csv, .tar files and a folder of them are webdataset, everything else is folder.",
    )
    label_columns: ColumnNames = Field(
        (),
        description="Columns of a CSV file with the label, labels or numbers of an image. Default: label, or a column "
        "of a similar name; else all others. For task.name=multilabel, one column with labels as in a;b, a|b or a b, "
        "or a column of 0 and 1 for each label.",
    )
    val_path: Text | None = Field(
        None,
        title="validation shards",
        description="Tar shards of a webdataset for validation. Example: shards/val-{00..06}.tar. Default: "
        "data.val_split of data.path.",
    )
    download: bool = Field(False, description="Download a missing torchvision dataset, or data.archive, to data.path.")
    archive: Literal["flower-photos"] | None = Field(
        None,
        description="Archive that data.download unpacks to data.path. It does so only if that folder (default: "
        "data/flower-photos) does not exist. flower-photos has TensorFlow's 3,670 photos of five flowers "
        "(218 MiB).",
    )
    checksum: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = Field(
        None, title="SHA-256", description="SHA-256 that a download of data.archive must have, in hexadecimal."
    )
    batch_size: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] = Field(
        64,
        description="Batch size per rank, or auto. auto finds the largest that fits in memory. With "
        "device.parallel=dp, it is the batch size per GPU. The default shrinks to the training images if "
        "they do not fill a step.",
    )
    drop_last: bool = Field(
        True, title="drop last batch", description="Drop the last incomplete batch of each training epoch."
    )
    sampler: Literal["shuffle", "balanced"] = Field(
        "shuffle",
        description="Training images of an epoch: shuffle or balanced. shuffle takes each image once, in random order; "
        "balanced draws as many with replacement, each class with equal probability.",
    )
    pipeline: Literal["auto", "memory", "stream", "fixed"] = Field(
        "auto",
        title="input pipeline",
        description="Input pipeline: auto, memory, stream or fixed. memory decodes all images once and keeps them in "
        "(GPU) memory; stream loads them with workers in every epoch; auto uses memory if they fit and it is faster; "
        "fixed repeats one batch, to measure throughput without input.",
    )
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Loader workers per rank, or auto. They are threads or DataLoader workers that load images in "
        "the stream pipeline. auto measures how many are needed; 0 loads in the rank's own process.",
    )
    worker_type: Literal["auto", "threads", "processes"] = Field(
        "auto",
        title="kind of workers",
        description="What loads images when streaming: threads, processes or auto. threads are those of one loader "
        "process per rank; processes are DataLoader workers. auto uses threads for image files without "
        "augmentation per image (affine, policy, color jitter, grayscale, blur, transform), else processes.",
    )
    prefetch: int = Field(4, ge=1, description="Number of batches that each loader process prefetches.")
    image_size: int | None = Field(
        None,
        ge=1,
        description="Size of the training images in pixels. Default: that of pretrained "
        "weights or of the dataset; 224 for image files.",
    )
    size_schedule: SizeSchedule = Field(
        (),
        title="progressive size",
        description="Sizes of the training images, each from an epoch on. They replace data.image_size (progressive "
        "resizing). Example: [160@1, 192@13]. Evaluation uses data.val_crop; else data.image_size; else "
        "the largest of these sizes.",
    )
    val_resize: int | None = Field(
        None,
        ge=1,
        title="resize",
        description="In evaluation, resize the shorter edge to this many pixels. The center crop follows. Default: "
        "that of pretrained weights; else crop the largest center square and resize it.",
    )
    val_crop: int | None = Field(
        None,
        ge=1,
        title="evaluation size",
        description="Height and width of the model's input in evaluation, in pixels. Default: that of "
        "pretrained weights; else data.image_size.",
    )
    fit: Fit | None = Field(
        None,
        title="aspect ratio",
        description="How images that are not square become so: crop or squash. crop cuts their ends off; squash "
        "distorts them. Default: that of pretrained weights; else crop.",
    )
    interpolation: Interpolation | None = Field(
        None,
        description="Filter that resizes images, with antialiasing as in Pillow. It is nearest, bilinear, bicubic or "
        "lanczos. Default: that of pretrained weights; else bilinear.",
    )
    channels: Literal[1, 3] | None = Field(
        None,
        description="Input channels: 1 (grayscale) or 3 (RGB). Default: the dataset's own; 3 for image files.",
    )
    num_classes: int | None = Field(
        None,
        ge=2,
        title="classes",
        description="Number of classes; must match the dataset. For fake, the number of classes to generate.",
    )
    val_split: float = Field(
        0.2,
        gt=0,
        lt=1,
        title="validation split",
        description="Fraction of each class held out for validation. Used if the dataset has no validation set of its "
        "own.",
    )
    mean: Floats | None = Field(
        None,
        min_length=1,
        max_length=3,
        description="Mean of each channel, for images scaled to [0, 1]. Default: that of pretrained weights or of the "
        "dataset.",
    )
    std: Floats | None = Field(
        None,
        min_length=1,
        max_length=3,
        description="Standard deviation of each channel, for images scaled to [0, 1]. Default: that of pretrained "
        "weights or of the dataset.",
    )
    allow_empty: bool = Field(
        False,
        title="empty classes",
        description="Allow class folders without a readable image. Their classes stay in the output of the model.",
    )
    on_bad: Literal["fail", "skip"] = Field(
        "fail",
        title="unreadable image",
        description="On an image that becomes unreadable during training: fail or skip. Skipped images are counted. "
        "Images that are unreadable at the start are always skipped and listed. Lines of a CSV file whose image is "
        "missing stop the start, or are skipped and listed with skip.",
    )
    fake_train: int = Field(
        1024, ge=1, le=10**9, title="training images", description="Number of training images of the dataset fake."
    )
    fake_val: int = Field(
        256, ge=1, le=10**9, title="validation images", description="Number of validation images of the dataset fake."
    )

    @property
    def default_path(self) -> str | None:
        """`path`, or the folder below the working folder to which an archive is downloaded."""
        if self.path is None and self.dataset == "folder" and self.download and self.archive is not None:
            return f"data/{self.archive}"
        return self.path

    @property
    def epoch_sizes(self) -> tuple[tuple[int, int], ...]:
        """`size_schedule` as pairs of a first epoch, from 1, and the size from there on."""
        pairs = (entry.split("@") for entry in self.size_schedule)
        return tuple((int(epoch), int(size)) for size, epoch in pairs)

    @property
    def max_train_size(self) -> int | None:
        """Largest size of the training images; None if the dataset or pretrained weights decide."""
        return max((size for _, size in self.epoch_sizes), default=self.image_size)

    @property
    def numeric_batch_size(self) -> int:
        """`batch_size`, or for `auto` the batch size assumed before the search for the largest one has run."""
        return 64 if self.batch_size == "auto" else self.batch_size


class AugmentConfig(Section):
    """Section `augment`: augmentation of training images."""

    crop_padding: int = Field(0, ge=0, description="Padding in pixels for random crops of training images; 0 disables.")
    resized_crop: bool = Field(
        False,
        description="Crop a random region and resize it to the input size. The region's area and aspect ratio are "
        "random (RandomResizedCrop).",
    )
    crop_scale: FloatPair = Field(
        (0.08, 1.0), description="Minimum and maximum area of resized_crop, as fractions of the image."
    )
    crop_ratio: FloatPair = Field(
        (0.75, 4 / 3), description="Minimum and maximum aspect ratio (width / height) of resized_crop."
    )
    flip: bool = Field(
        False, title="horizontal flip", description="Flip training images horizontally with probability 0.5."
    )
    vertical_flip: bool = Field(False, description="Flip training images vertically with probability 0.5.")
    rotation: float = Field(
        0.0,
        ge=0,
        le=180,
        description="Random affine transform: maximum rotation in degrees, in both directions; 0 disables. Pixels from "
        "outside the image get the mean color. The labels stay the same, also numbers such as an angle.",
    )
    translate: float = Field(
        0.0,
        ge=0,
        le=1,
        title="translation",
        description="Random affine transform: maximum shift along each axis, as a fraction of the image; 0 disables.",
    )
    scale: FloatPair = Field(
        (1.0, 1.0),
        description="Random affine transform: minimum and maximum scale factor. Example: [0.8, 1.2].",
    )
    shear: float = Field(
        0.0,
        ge=0,
        lt=90,
        description="Random affine transform: maximum horizontal shear in degrees, in both directions; 0 disables.",
    )
    brightness: float = Field(
        0.0, ge=0, le=10, description="Color jitter: maximum relative change of brightness; 0 disables."
    )
    contrast: float = Field(
        0.0, ge=0, le=10, description="Color jitter: maximum relative change of contrast; 0 disables."
    )
    saturation: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Color jitter: maximum relative change of saturation; 0 disables. No effect on grayscale images.",
    )
    hue: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Color jitter: maximum hue shift, 0 to 0.5 of the color wheel. No effect on grayscale images.",
    )
    grayscale: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability of converting a training image to gray, with all its channels. No effect on grayscale "
        "images.",
    )
    blur: float = Field(
        0.0,
        ge=0,
        le=1,
        title="Gaussian blur",
        description="Probability of Gaussian blur: a kernel of a tenth of the image, with a standard deviation of 0.1 "
        "to 2 pixels.",
    )
    policy: Literal["none", "randaugment", "trivialaugment"] = Field(
        "none", description="Automatic augmentation: none, randaugment or trivialaugment."
    )
    policy_ops: int = Field(
        2, ge=1, le=14, title="operations", description="Number of operations that randaugment applies to each image."
    )
    policy_magnitude: int = Field(
        9,
        ge=0,
        le=MAX_POLICY_MAGNITUDE,
        title="magnitude",
        description="Magnitude of randaugment's operations, from 0 to 30.",
    )
    policy_magnitude_std: float = Field(
        0.0,
        ge=0,
        le=1000,
        title="magnitude std",
        description="Standard deviation of the magnitude of randaugment, which each operation draws anew; 0 disables. "
        "timm's mstd of 0.5, on its scale of 0 to 10, is 1.5.",
    )
    erasing: float = Field(
        0.0,
        ge=0,
        le=1,
        title="random erasing",
        description="Probability of random erasing: a rectangle is set to the mean color.",
    )
    mixup: float = Field(
        0.0, ge=0, le=1000, description="Alpha of mixup, which blends pairs of images and labels; 0 disables."
    )
    cutmix: float = Field(
        0.0,
        ge=0,
        le=1000,
        title="CutMix",
        description="Alpha of CutMix, which pastes a patch of another image; 0 disables. If augment.mixup is set too, "
        "each batch uses one of the two at random.",
    )
    mix_probability: float = Field(1.0, gt=0, le=1, description="Probability that a batch is mixed by mixup or CutMix.")
    mix_epochs: int | None = Field(
        None, ge=1, description="Number of epochs with mixup and CutMix, from the first one on. Default: all epochs."
    )
    transform: UserCodePath | None = Field(
        None,
        description="User code (module:name) that transforms each training image. It is called with a uint8 tensor of "
        "shape (C, H, W), or with the floating-point tensor of a user dataset, and returns one of the same shape and "
        "dtype. It runs after crop, flips, affine transform, policy, color jitter, grayscale and blur, and "
        "before erasing, mixup and normalization. "
        "Example: engine/OWN_CODE.md.",
    )
