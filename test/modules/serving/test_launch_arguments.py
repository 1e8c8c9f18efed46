"""What a service is launched with; the messages reach users through ``AsyncVLLM`` and are tested there too."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrl_moe.modules.serving.launch_arguments import check_backend, check_model, default_timeout, with_fp32_head


def test_an_unknown_backend_no_replica_and_words_of_ray_are_refused() -> None:
    check_backend("local", 1, name=None)
    check_backend("ray", 2, name="policy")
    with pytest.raises(ValueError, match=r"backend must be 'local' .* or 'ray'"):
        check_backend("mpi", 1)
    with pytest.raises(ValueError, match="num_replicas must be at least 1, got 0"):
        check_backend("local", 0)
    with pytest.raises(ValueError, match="name given with backend='local': only backend='ray' knows them"):
        check_backend("local", 1, name="policy", resources=None)


def test_a_folder_without_a_model_is_refused_and_a_hub_name_is_not(tmp_path: Path) -> None:
    assert check_model("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        check_model(str(tmp_path))
    with pytest.raises(ValueError, match="the folder does not exist"):
        check_model(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    assert check_model(str(tmp_path)) == str(tmp_path)


def test_the_environment_may_give_a_start_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRL_VLLM_TIMEOUT_SECONDS", raising=False)
    assert default_timeout() == 600.0
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "1200")
    assert default_timeout() == 1200.0
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="must be a number of seconds, got 'soon'"):
        default_timeout()


def test_a_float32_head_is_one_more_override() -> None:
    assert with_fp32_head(None) == {"head_dtype": "float32"}
    assert with_fp32_head({"num_hidden_layers": 2}) == {"num_hidden_layers": 2, "head_dtype": "float32"}
    with pytest.raises(ValueError, match="needs hf_overrides to be a mapping"):
        with_fp32_head(dict)
