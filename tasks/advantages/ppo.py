"""Proximal policy optimization with a critic: generalised advantage estimation (Schulman et al. 2016,
"High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16).

Over the trained tokens t = 1 … T of a sample, with the critic's values V_t, V_{T+1} = 0 and the sample's reward r,

    r_t     = -kl_coef · KL_t,  plus r at t = T
    δ_t     = r_t + gamma · V_{t+1} - V_t
    A_t     = δ_t + gamma · lambd · A_{t+1}
    return  = A_t + V_t

Tokens that are not trained on belong to the environment: they take no part, and have advantage and return 0.

**Truncated samples.** A response that was cut off at the maximum length has not ended there, but V_{T+1} = 0 says that
it has. With `bootstrap_truncated` the critic's value stands in for the missing rest (Pardo et al. 2018, "Time Limits in
Reinforcement Learning", section 3.1). There is no value after the last token, so the episode is cut before it:
r_T = V_T, without reward and KL, and so

    A_T = 0,   return_T = V_T,   δ_{T-1} = r_{T-1} + gamma · V_T - V_{T-1}

The sample's reward, which the grader gave for a partial response, takes no part: V_T estimates the reward of the full
response, and their sum would count it twice.
"""

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch, TrainedTokens


@plugin(
    needs={"values"},
    reads={"gamma", "lambd", "kl_coef", "bootstrap_truncated", "value_clip", "num_critic_only_steps"},
)
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages and returns. Rewards are not normalised, and samples are independent of each other."""
    assert batch.values is not None
    tokens = TrainedTokens(batch.loss_masks)
    rewards, values = batch.token_rewards(tokens, config.kl_coef), tokens.of(batch.values)
    if config.bootstrap_truncated:
        assert batch.truncated is not None
        cut = tokens.last[batch.truncated[tokens.ending]]
        rewards[cut] = values[cut]
    errors = rewards + config.gamma * tokens.following(values) - values
    advantages = tokens.discounted(errors, config.gamma * config.lambd)
    return tokens.spread(advantages), tokens.spread(advantages + values)
