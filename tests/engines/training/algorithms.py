"""Algorithms that have every loss and correction of ours among them, by what is special about each."""

from typing import Any

from cairn.configs.schema.algorithm import AlgorithmConfig

SHARED: dict[str, Any] = {
    "use_tis": True,
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "use_unbiased_kl": True,
    "use_opsm": True,
    "opsm_delta": 0.05,
    "get_mismatch_metrics": True,
}
ALGORITHMS = {
    "GSPO, responses weighed, rejected and vetoed": AlgorithmConfig(
        advantage_estimator="gspo",
        eps_clip=0.02,
        eps_clip_high=0.05,
        entropy_coef=0.01,
        custom_tis_function_path="mis",
        tis_level="sequence",
        tis_mode="clip",
        tis_clip=3.0,
        tis_clip_low=0.2,
        use_rs=True,
        rs_level="geometric",
        rs_lower_bound=0.8,
        rs_upper_bound=1.25,
        rs_veto_threshold=0.1,
        tis_batch_normalize=True,
        **SHARED,
    ),
    "CISPO, IcePop": AlgorithmConfig(
        advantage_estimator="cispo",
        eps_clip=1.0,
        eps_clip_high=0.28,
        custom_tis_function_path="icepop",
        tis_clip_low=0.5,
        tis_batch_normalize=True,
        calculate_per_token_loss=True,
        **SHARED,
    ),
    "Clip-Cov": AlgorithmConfig(
        loss_type="clip_cov",
        eps_clip=0.02,
        clip_cov_ratio=0.3,
        clip_cov_lb=-9.0,
        clip_cov_ub=9.0,
        tis_clip=1.2,
        **SHARED,
    ),
    "PPO, tokens masked": AlgorithmConfig(
        eps_clip_c=3.0,
        custom_tis_function_path="mis",
        tis_mode="mask",
        tis_clip_low=0.4,
        use_rs=True,
        rs_level="sequence",
        rs_lower_bound=0.05,
        rs_upper_bound=20.0,
        kl_loss_type="k1",
        distillation_loss_coef=0.2,
        distillation_topk=7,
        loss_scale_factor=20,
        **SHARED,
    ),
}
