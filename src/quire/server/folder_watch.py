"""Models that come and go with the files of a folder, while the server runs."""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.errors import QuireError
from quire.server.logs import LOGGER, log
from quire.server.model_folder import ModelFolder
from quire.server.model_service import ModelService
from quire.server.residency import Residency

if TYPE_CHECKING:
    from quire.server.service import Service

_LOOK_S = 2.0  # between two looks at the folder


async def watch_folder(service: "Service", folder: ModelFolder, residency: Residency) -> None:
    """Look again and again, until it is cancelled."""
    said = ""  # what was wrong at the last look
    gone: set[Path] = set()
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            changes = await asyncio.to_thread(folder.look)
            gone.update(changes.gone)
            gone.difference_update(changes.come)
            gone = _remove(service, residency, gone)
            for path in changes.gone:
                service.left_out.pop(path.name, None)
            for path in changes.come:
                await _add(service, folder, residency, path)
            said = ""
        except OSError as error:  # the models stay: it may come back
            if str(error) != said:
                said = str(error)
                log("models_unreadable", logging.ERROR, error=said)
        except Exception:  # a bug: the next look may go well
            LOGGER.exception("models_unreadable")


def _remove(service: "Service", residency: Residency, gone: set[Path]) -> set[Path]:
    """The last model stays until there is another one; those that are left to be removed."""
    left = set()
    for model in [each for each in service.models if _path_in_folder(each) in gone]:
        if len(service.models) > 1:
            service.models = [each for each in service.models if each is not model]
            residency.leave(model)
            log("model_removed", model=model.name)
        elif (path := _path_in_folder(model)) is not None:
            left.add(path)
    return left


def _path_in_folder(model: ModelService) -> Path | None:
    """Where a model of a folder is; None of one that the user named otherwise."""
    path = Path(model.source.model)
    return path if model.name == path.name else None


async def _add(service: "Service", folder: ModelFolder, residency: Residency, path: Path) -> None:
    known = {name for model in service.models for name in model.model_names}
    if path.name in known:
        return
    try:
        model = service.new_model(folder.make(path))
        can_be_served = await service.enter(residency, model)
    except QuireError as error:  # of the configuration, which is read again
        service.leave_out(path.name, error)
        return
    except Exception:  # a bug: others that came with it are served
        LOGGER.exception("model_left_out")
        return
    if can_be_served:
        service.models = [*service.models, model]
        log("model_added", model=model.name)
