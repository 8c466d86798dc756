"""A forecaster of time series knows what was observed, goes on from a cache, and is measured as the field does it."""

import datetime
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from support import TOLERANCE, assert_close, every_variant
from test_loading import run_without_titans_hf
from torch import Tensor
from transformers import AutoConfig, AutoModelForTimeSeriesPrediction, Trainer, TrainingArguments
from typer.testing import CliRunner

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig
from titans_hf.cli.app import app
from titans_hf.hub.series_card import forecaster_card
from titans_hf.studies.series import main
from titans_hf.studies.series_data import read_series, split_rows
from titans_hf.studies.series_models import DLinear
from titans_hf.studies.series_report import markdown
from titans_hf.studies.series_runs import Errors, errors, mean_squared, split_window

B, L, C, F = 2, 23, 3, 7


def tiny_config(variant: str = "lmm", **fields) -> TitansTimeSeriesConfig:
    sizes = {
        "hidden_size": 14,
        "intermediate_size": 22,
        "num_attention_heads": 2,
        "head_dim": 6,
        "num_persistent_tokens": 1,
        "memory_chunk_size": 4,
        "segment_size": 4,
        "sliding_window": 3,
        "context_length": L,
        "prediction_length": F,
        "num_input_channels": C,
        "patch_length": 5,
        "patch_stride": 3,
    }
    return TitansTimeSeriesConfig(variant=variant, **{**sizes, **fields})


def tiny_forecaster(variant: str = "lmm", dtype=torch.float64, **fields) -> TitansForTimeSeriesPrediction:
    """A model in which every parameter matters."""
    torch.manual_seed(0)
    model = TitansForTimeSeriesPrediction(tiny_config(variant, **fields)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def series(length: int = L, seed: int = 0, dtype=torch.float64, batch: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    walk = torch.randn(batch, length, C, generator=generator, dtype=torch.float64).cumsum(1)
    return (10 + walk).to(dtype)


# The model


@every_variant
def test_going_on_from_a_cache_equals_reading_all_at_once(variant):
    model, values = tiny_forecaster(variant), series(L + 5 * 3)
    values[0, 1:3, 1] = math.nan
    values[1, L : L + 4, 2] = math.nan
    with torch.no_grad():
        expected = model(values).prediction_outputs
        found = model(values[:, :L], use_cache=True)
        first = found.past_key_values.nbytes
        branch = found.past_key_values.clone()
        for piece in (values[:, L : L + 3], values[:, L + 3 : L + 9], values[:, L + 9 :]):
            found = model(piece, past_key_values=found.past_key_values)
        again = model(values[:, L:], past_key_values=branch)
    assert_close(found.prediction_outputs, expected, TOLERANCE[torch.float64])
    assert_close(again.prediction_outputs, expected, TOLERANCE[torch.float64])
    assert found.past_key_values.nbytes == first


def test_reading_a_longer_past_changes_the_forecast():
    """Else the equality above would say nothing about the memory."""
    model, values = tiny_forecaster(), series(L + 3)
    with torch.no_grad():
        found = model(values[:, :L], use_cache=True)
        before = found.prediction_outputs
        read = model(values[:, L:], past_key_values=found.past_key_values.clone()).prediction_outputs
        untouched = model(values[:, L:], past_key_values=found.past_key_values, memory_read_only=True)
    assert (read - before).abs().max() > 1e-2
    assert (read - untouched.prediction_outputs).abs().max() > 1e-6


def test_what_stands_in_missing_places_does_not_matter():
    model, values = tiny_forecaster(), series()
    mask = torch.rand(values.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    with torch.no_grad():
        expected = model(values, mask)
        for filling in (math.nan, 1e9, math.inf):
            found = model(values.masked_fill(~mask, filling), mask)
            assert torch.equal(found.prediction_outputs, expected.prediction_outputs)
        as_nan = model(values.masked_fill(~mask, math.nan))
        full = model(values)
    assert torch.equal(as_nan.prediction_outputs, expected.prediction_outputs)
    assert (full.prediction_outputs - expected.prediction_outputs).abs().max() > 1e-3
    row, channel = values[1, :, 2], mask[1, :, 2]
    assert_close(expected.loc[1, 0, 2], row[channel].mean(), 1e-12)
    assert_close(expected.scale[1, 0, 2], (row[channel].var(correction=0) + 1e-5).sqrt(), 1e-12)


def test_a_missing_value_is_not_a_value_at_the_mean():
    model, values = tiny_forecaster(), series()
    values[:, 11] = (values.sum(1) - values[:, 11]) / (L - 1)  # at the mean of the others: of the same mean
    missing = values.clone()
    missing[:, 11] = math.nan
    with torch.no_grad():
        here, gone = model(values), model(missing)
    assert_close(here.loc, gone.loc, 1e-12)
    assert (here.prediction_outputs - gone.prediction_outputs).abs().max() > 1e-3


def test_a_short_past_is_one_with_missing_values_in_front():
    model, values = tiny_forecaster(), series()
    padded = values.clone()
    padded[:, :9] = math.nan
    with torch.no_grad():
        assert_close(model(values[:, 9:]).prediction_outputs, model(padded).prediction_outputs, 1e-12)


def test_a_forecast_moves_and_grows_with_its_series():
    model, values = tiny_forecaster(), series()
    with torch.no_grad():
        expected = 1000 * model(values).prediction_outputs - 77
        found = model(1000 * values - 77).prediction_outputs
    assert ((found - expected).abs() / 1000).max() < 1e-4  # the floor of the variance does not grow


def test_series_are_read_by_themselves_as_patches_and_together_as_variates():
    values = series()
    other = values.clone()
    other[:, :, 2] = series(seed=5)[:, :, 2]
    for tokens, alone in (("patch", True), ("variate", False)):
        model = tiny_forecaster(series_tokens=tokens)
        with torch.no_grad():
            change = (model(values).prediction_outputs - model(other).prediction_outputs).abs().amax((0, 1))
        assert change[2] > 1e-3
        assert ((change[:2] == 0) if alone else (change[:2] > 1e-6)).all()  # the first channel hears of the last, too


def test_a_model_in_half_precision_takes_values_as_they_are():
    """Mean and deviation keep the precision of the values, and only what is between them has the model's."""
    model, values = tiny_forecaster(dtype=torch.float32), 1e4 + series(L + 3, dtype=torch.float32)
    with torch.no_grad():
        expected = model(values)
        found = model.bfloat16()(values[:, :L], use_cache=True)
        found = model(values[:, L:], past_key_values=found.past_key_values)
    assert torch.equal(found.loc, expected.loc)
    assert found.prediction_outputs.dtype == torch.float32
    difference = (found.prediction_outputs - expected.prediction_outputs) / expected.scale
    assert difference.abs().max() < 0.3


def test_variate_tokens_leave_no_cache():
    model = tiny_forecaster(series_tokens="variate")
    with torch.no_grad():
        assert model(series(), use_cache=True).past_key_values is None
        with pytest.raises(ValueError, match="variate"):
            model(series(L + 3))


def test_the_loss_is_the_mean_squared_error_of_observed_targets():
    model, future = tiny_forecaster(), series(F, seed=3)
    future[0, 2, 1] = math.nan
    mask = torch.ones_like(future)
    mask[1, 5, 0] = 0
    with torch.no_grad():
        found = model(series(), future_values=future, future_observed_mask=mask)
    errors = [
        (found.prediction_outputs[place] - future[place]) ** 2
        for place in [(b, t, c) for b in range(B) for t in range(F) for c in range(C)]
        if place not in ((0, 2, 1), (1, 5, 0))
    ]
    assert_close(found.loss, torch.stack(errors).mean(), 1e-12)


SWITCHES = [
    {"memory_depth": 1},
    {"memory_depth": 3},
    {"memory_momentum": False},
    {"memory_forget": False},
    {"memory_conv": False},
    {"memory_write": "chunk"},
    {"memory_gates": "chunk"},
    {"num_persistent_tokens": 0},
    {"scaling": False},
]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_every_switch_of_the_memory_works(fields):
    model, values = tiny_forecaster(**fields), series(L + 3)
    loss = model(values, future_values=series(F, seed=3)).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.no_grad():
        found = model(values[:, :L], use_cache=True)
        found = model(values[:, L:], past_key_values=found.past_key_values)
        assert_close(found.prediction_outputs, model(values).prediction_outputs, TOLERANCE[torch.float64])


def test_a_saved_forecaster_loads_to_the_same_forecast(tmp_path):
    model, values = tiny_forecaster("mag", torch.float32, memory_write="chunk"), series(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for auto in (TitansForTimeSeriesPrediction, AutoModelForTimeSeriesPrediction):
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is TitansForTimeSeriesPrediction
        with torch.no_grad():
            assert_close(loaded(values).prediction_outputs, model(values).prediction_outputs, 1e-6)
    assert AutoConfig.from_pretrained(tmp_path).to_dict()["context_length"] == L
    assert loaded.config.memory_step == model.config.memory_step == "normalised"


def test_a_saved_forecaster_brings_its_own_code(tmp_path):
    """Where titans_hf cannot be imported, `trust_remote_code=True` gives the same forecast."""
    model, values = tiny_forecaster(dtype=torch.float32), series(dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.save((values, model(values).prediction_outputs), tmp_path / "expected.pt")
    code = """
import torch
from transformers import AutoModelForTimeSeriesPrediction
values, expected = torch.load(sys.argv[2])
model = AutoModelForTimeSeriesPrediction.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
with torch.no_grad():
    found = model(values[:, :-3], use_cache=True)
    torch.testing.assert_close(model(values).prediction_outputs, expected, rtol=0, atol=1e-5)
print("forecast")
"""
    arguments = (tmp_path / "saved", tmp_path / "expected.pt")
    printed = run_without_titans_hf(code, *arguments, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert printed.strip().endswith("forecast")


def test_trainer_trains_it_and_the_loss_falls(tmp_path):
    steps = torch.arange(200.0)
    wave = torch.stack([torch.sin(steps / 3 + c) for c in range(C)], dim=1)
    rows = [{"past_values": wave[i : i + L], "future_values": wave[i + L : i + L + F]} for i in range(0, 160)]
    torch.manual_seed(0)
    model = TitansForTimeSeriesPrediction(tiny_config(hidden_size=16))
    settings = TrainingArguments(
        tmp_path,
        max_steps=40,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        logging_steps=10,
        use_cpu=True,
        report_to=[],
        label_names=["future_values"],
        save_strategy="no",
    )
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows[:13])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 3
    assert trainer.predict(rows[:5]).predictions[0].shape == (5, F, C)


BAD_INPUT = [
    ({"past_values": torch.ones(B, L, C + 1)}, "num_input_channels"),
    ({"past_values": torch.ones(B, L)}, "past_values"),
    ({"past_values": torch.ones(B, L + 2, C)}, "patch_stride"),
    ({"past_values": torch.full((B, L, C), math.nan)}, "nothing observed"),
    ({"past_values": torch.full((B, L, C), math.inf)}, "infinite"),
    ({"past_values": torch.ones(B, L, C), "past_observed_mask": torch.ones(B, L)}, "past_observed_mask"),
    ({"past_values": torch.ones(B, L, C), "future_values": torch.ones(B, F + 1, C)}, "future_values"),
]


@pytest.mark.parametrize("given, named", BAD_INPUT, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_is_refused_by_name(given, named):
    model = tiny_forecaster(dtype=torch.float32)
    with pytest.raises(ValueError, match=named):
        model(**given)


def test_a_cache_of_another_batch_is_refused():
    model, values = tiny_forecaster(), series()
    with torch.no_grad():
        cache = model(values, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="past_key_values"):
            model(series(3, batch=B + 1), past_key_values=cache)
        with pytest.raises(ValueError, match="patch_stride"):
            model(series(4), past_key_values=cache)


@pytest.mark.parametrize(
    "fields",
    [
        {"patch_stride": 6},
        {"patch_length": L + 1},
        {"prediction_length": 0},
        {"head_dropout": 1.0},
        {"series_tokens": "point"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_bad_field_is_refused_by_name(fields):
    with pytest.raises(ValueError, match=f"`{next(iter(fields))}`"):
        tiny_config(**fields)


def test_a_card_tells_what_was_measured(tmp_path):
    tiny_forecaster(dtype=torch.float32).save_pretrained(tmp_path)
    found = {
        "suite": "series",
        "memory": "on",
        "data": "waves",
        "split": "test",
        "windows": 41,
        "mse": 0.123,
        "mae": 0.4,
        "command": "x",
    }
    (tmp_path / "waves.json").write_text(json.dumps(found))
    card = forecaster_card(tmp_path, "waves-1", "me/waves-1")
    assert card.data.pipeline_tag == "time-series-forecasting"
    assert "| waves, test, 41 windows | 0.1230 | 0.4000 |" in str(card)
    assert "AutoModelForTimeSeriesPrediction" in str(card)
    printed = CliRunner().invoke(app, ["card", str(tmp_path)])
    assert printed.exit_code == 0
    assert f"| channels | {C} |" in printed.output


# The data


def write_csv(path: Path, rows: int = 300, channels: int = C, **changes: str) -> Path:
    """Waves, hour by hour; `changes` replaces lines by number, as `line7="..."`."""
    start = datetime.datetime(2016, 7, 1)
    lines = ["date," + ",".join(f"x{c}" for c in range(channels))]
    for row in range(rows):
        values = (f"{math.sin(row / 3 + c) + 0.1 * math.cos(row * 1.7 + c):.6f}" for c in range(channels))
        lines.append(f"{start + row * datetime.timedelta(hours=1)},{','.join(values)}")
    for place, line in changes.items():
        lines[int(place.removeprefix("line")) - 1] = line
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_splits_have_the_borders_of_the_field():
    hourly = {"train": (0, 8640), "val": (8640, 11520), "test": (11520, 14400)}
    assert split_rows("ETTh1", 17420) == split_rows("ETTh2", 17420) == hourly
    assert split_rows("ETTm2", 69680) == {name: (4 * a, 4 * b) for name, (a, b) in hourly.items()}
    assert split_rows("weather", 52696) == {"train": (0, 36887), "val": (36887, 42157), "test": (42157, 52696)}
    assert split_rows("electricity", 26304) == {"train": (0, 18412), "val": (18412, 21044), "test": (21044, 26304)}


def test_windows_are_as_many_as_the_field_counts():
    """At look-back 96 and horizon 96 of ETTh1: 8449, 2785 and 2785."""
    from titans_hf.studies.series_data import Series

    found = Series("ETTh1", ["OT"], torch.zeros(17420, 1), split_rows("ETTh1", 17420))
    assert [len(found.windows(split, 96, 96)) for split in ("train", "val", "test")] == [8449, 2785, 2785]
    assert [len(found.windows(split, 96, 720)) for split in ("train", "val", "test")] == [7825, 2161, 2161]


def test_values_are_scaled_by_the_training_rows(tmp_path):
    found = read_series(write_csv(tmp_path / "waves.csv", line10="2016-07-01 08:00:00,,1.0,nan"))
    train = found.values[:210]
    assert found.rows == {"train": (0, 210), "val": (210, 240), "test": (240, 300)}
    assert found.channels == ["x0", "x1", "x2"]
    assert found.values[8].isnan().tolist() == [True, False, True]
    assert train.nanmean(0).abs().max() < 1e-6
    assert ((train**2).nanmean(0) - 1).abs().max() < 1e-5
    past, future = split_window(found.windows("val", 13, 5)[4][None], 13)
    assert torch.equal(past[0], found.values[210 - 13 + 4 : 210 + 4])
    assert torch.equal(future[0], found.values[210 + 4 : 210 + 9])


BAD_FILES = {
    "no date": ({"line1": "time,x0,x1,x2"}, "`date`"),
    "a gap": ({"line9": "2016-07-01 07:30:00,1,2,3"}, "line 9.*--irregular"),
    "no number": ({"line9": "2016-07-01 07:00:00,1,two,3"}, "line 9: 'two'"),
    "infinite": ({"line9": "2016-07-01 07:00:00,1,inf,3"}, "line 9"),
    "a short line": ({"line9": "2016-07-01 07:00:00,1"}, "line 9: 2 fields"),
    "no date in it": ({"line9": "yesterday,1,2,3"}, "line 9: `date`"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_with_its_line(name, tmp_path):
    changes, message = BAD_FILES[name]
    with pytest.raises(ValueError, match=message):
        read_series(write_csv(tmp_path / "waves.csv", **changes))


def test_irregular_dates_are_taken_where_it_is_said(tmp_path):
    path = write_csv(tmp_path / "waves.csv", line9="2016-07-01 07:30:00,1,2,3")
    assert len(read_series(path, irregular=True).values) == 300


def test_a_known_file_of_another_frequency_or_length_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ETTm1 by 0:15:00"):
        read_series(write_csv(tmp_path / "ETTm1.csv"))
    with pytest.raises(ValueError, match="fewer than the 14400"):
        read_series(write_csv(tmp_path / "ETTh1.csv"))


def test_a_horizon_that_does_not_fit_is_refused(tmp_path):
    found = read_series(write_csv(tmp_path / "waves.csv"))
    with pytest.raises(ValueError, match="horizon 31"):
        found.windows("val", 13, 31)
    with pytest.raises(ValueError, match="look-back 240"):
        found.windows("train", 240, 5)


def test_an_empty_column_is_refused_by_name(tmp_path):
    path = tmp_path / "waves.csv"
    write_csv(path, channels=1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0] + ",none", *(line + "," for line in lines[1:])]))
    with pytest.raises(ValueError, match="'none'"):
        read_series(path)


# The errors


def test_errors_count_every_window_and_every_observed_target():
    windows = torch.randn(300, C, 18, generator=torch.Generator().manual_seed(0))
    windows[7, 1, 15] = math.nan
    found = errors(lambda values: values[:, -5:] * 0 + 0.5, windows, 13)
    difference = windows[..., 13:] - 0.5
    assert abs(found.mean()["mse"] - (difference**2).nanmean().item()) < 1e-6
    assert abs(found.mean()["mae"] - difference.abs().nanmean().item()) < 1e-6
    assert abs(found.without_last_batch()["mse"] - (difference[:256] ** 2).nanmean().item()) < 1e-6
    assert found.mean() != found.without_last_batch()
    none = Errors(*(x[:5] for x in (found.squared, found.absolute, found.count)))
    assert math.isnan(none.without_last_batch()["mse"])


def test_a_table_has_means_and_published_figures_only_of_all_horizons():
    runs = [
        {"data": data, "horizon": horizon, "model": "titans", "look_back": 96, **errors, "dropping": errors}
        for data, horizons in (("ETTh1", (96, 192, 336, 720)), ("mine", (96, 192)))
        for horizon in horizons
        for errors in [{"mse": horizon / 1000, "mae": horizon / 2000}]
    ]
    table = markdown(runs)
    assert "| ETTh1 | mean | 0.336 | 0.168 |" in table
    assert "| ETTh1 | published | 0.420 | 0.421 |" in table
    assert "| mine | 336 | - | - |" in table
    assert "| mine | mean | - | - |" in table
    assert "mine | published" not in table
    assert "published" not in markdown(runs[:3])


def test_dlinear_continues_a_line_once_trained():
    torch.manual_seed(0)
    model = DLinear(30, 4)
    slope = torch.rand(64, 1, C) - 0.5
    steps = torch.arange(34.0)[None, :, None] / 30
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(120):
        loss = mean_squared(model((slope * steps)[:, :30]), (slope * steps)[:, 30:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 100


# The study and the command


def tables(path: Path) -> dict:
    return json.loads(path.read_text())


def study(monkeypatch, tmp_path, *more) -> None:
    small = ["--look-back", "16", "--horizons", "5", "8", "--epochs", "2", "--lr", "1e-3", "3e-3", "--windows", "40"]
    fields = ["titans.hidden_size=8", "titans.num_hidden_layers=1", "patchtst.patch_length=4", "patchtst.d_model=4"]
    fields += ["titans.patch_length=4", "titans.patch_stride=4", "patchtst.patch_stride=4"]
    words = ["series.py", str(tmp_path / "waves.csv"), *small, "--set", *fields, "--out", str(tmp_path / "runs"), *more]
    monkeypatch.setattr(sys, "argv", words)
    threads = torch.get_num_threads()
    main()
    torch.set_num_threads(threads)


def test_the_study_keeps_its_runs_and_the_command_repeats_their_errors(monkeypatch, tmp_path, capsys):
    write_csv(tmp_path / "waves.csv", line10="2016-07-01 08:00:00,,1.0,nan")
    study(monkeypatch, tmp_path, "--record", str(tmp_path / "series"))
    made = sorted((tmp_path / "runs").glob("*.json"))
    assert len(made) == 3 * (2 + 1)  # each model: two rates at the first horizon, the best at the second
    record = tables(tmp_path / "series.json")
    assert {(line["model"], line["horizon"]) for line in record["table"]} == {
        (model, horizon) for model in ("titans", "dlinear", "patchtst") for horizon in (5, 8)
    }
    assert str(tmp_path) not in json.dumps(record["runs"])
    assert (tmp_path / "series.png").stat().st_size > 10_000
    assert (tmp_path / "series.md").read_text() == markdown(record["runs"])
    best = {run["model"]: run["lr"] for run in record["runs"]}
    for model in best:
        rates = {r["lr"]: r["validation"] for r in record["learning_rates"] if r["model"] == model}
        assert rates[best[model]] == min(rates.values())

    times = [path.stat().st_mtime_ns for path in made]
    capsys.readouterr()
    study(monkeypatch, tmp_path)
    assert [path.stat().st_mtime_ns for path in made] == times
    assert "| waves | mean |" in capsys.readouterr().out

    for path in made:
        if "-8-dlinear-" in path.name:
            path.unlink()
    capsys.readouterr()
    study(monkeypatch, tmp_path, "--no-training")
    row = next(line for line in capsys.readouterr().out.splitlines() if "| waves | 8 |" in line)
    assert row.split("|")[5:7] == [" - ", " - "]  # the table says what is missing
    assert len(list((tmp_path / "runs").glob("*.json"))) == len(made) - 1

    run = next(path for path in made if "-5-titans-" in path.name)
    out = tmp_path / "found.json"
    words = ["eval-series", str(run.with_suffix("")), "--data", str(tmp_path / "waves.csv"), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert abs(tables(out)["mse"] - tables(run)["mse"]) < 1e-6
    assert f"MSE {tables(run)['mse']:.4f}" in done.output
    off = CliRunner().invoke(app, [*words[:-2], "--memory", "off", "--json"])
    assert off.exit_code == 0, off.output
    assert json.loads(off.stdout)["mse"] != tables(out)["mse"]

    write_csv(tmp_path / "wide.csv", channels=C + 1)
    refused = CliRunner().invoke(app, ["eval-series", str(run.with_suffix("")), "--data", str(tmp_path / "wide.csv")])
    assert refused.exit_code == 1
    assert "num_input_channels" in refused.output
