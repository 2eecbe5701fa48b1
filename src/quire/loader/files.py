"""open_model_file: finds out what a path holds and opens it, or says what to do instead."""

from pathlib import Path

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader import gguf, safetensors
from quire.loader.gguf import GGUFFile
from quire.loader.reading import DISK, Files
from quire.loader.safetensors import SafetensorsFolder

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_ZIP_MAGIC = b"PK\x03\x04"  # what torch.save writes


def open_model_file(path: str | Path, files: Files = DISK) -> GGUFFile | SafetensorsFolder:
    """Open a GGUF file (or the first part of a split one) or a folder of safetensors."""
    path = Path(path)
    if files.is_folder(path):
        _check_folder(path, files)
        return SafetensorsFolder(path, files)
    _check_file(path, files)
    return GGUFFile(path, files)


def _check_folder(folder: Path, files: Files) -> None:
    """Say what is missing from a folder that is not a safetensors model."""
    names = files.names(folder)
    if safetensors.WHOLE in names or safetensors.INDEX in names:
        if safetensors.CONFIG not in names:
            raise ModelFileError(f"{folder} has no {safetensors.CONFIG}, which describes the model")
        return
    quantised = [name for name in names if name.endswith(".gguf")]
    if quantised:
        raise ModelFileError(f"{folder} is a folder: give a file of it, such as {quantised[0]}")
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise _refuse_pickle(folder / pickles[0])
    raise ModelFileError(
        f"{folder} holds no model: quire looks for {safetensors.WHOLE} or {safetensors.INDEX}, or "
        "takes a GGUF file"
    )


def _check_file(path: Path, files: Files) -> None:
    """Say what a file is that is not GGUF."""
    file = files.open(path)
    if file.size == 0:
        raise ModelFileError(f"{path} is empty")
    start = file.read(0, min(len(gguf.MAGIC), file.size)).tobytes()
    if start == gguf.MAGIC:
        return
    if path.suffix in _PICKLE_SUFFIXES or start == _ZIP_MAGIC:
        raise _refuse_pickle(path)
    if path.suffix == ".safetensors" or path.name == safetensors.INDEX:
        raise ModelFileError(
            f"{path} is one file of a safetensors model: give its folder, which holds "
            f"{safetensors.CONFIG} too"
        )
    raise ModelFileError(
        f"{path} is no model that quire reads: it begins with {start!r}, and a GGUF file with "
        f"{gguf.MAGIC!r}"
    )


def _refuse_pickle(path: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} is a pickle, and reading a pickle runs whatever code is in it: save the model as "
        "safetensors (transformers: save_pretrained) or convert it to GGUF"
    )
