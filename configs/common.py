"""Defaults of every field, each with what it means; experiments start from these and change a
few."""

from ml_collections import ConfigDict


def advantage(group: str) -> ConfigDict:
    """GRPO's and HRPO's estimator: (r - mean) / (std + eps) within a group."""
    a = ConfigDict()
    a.group = group  # rows compared: prompt, hop, role or batch
    a.baseline = "mean"  # mean, or none (REINFORCE)
    a.std = True  # divided by the group's standard deviation
    a.ddof = 1  # 1: sample deviation, 0: population
    a.eps = 1e-6  # beside the deviation
    a.eps_inside = False  # within the root, with the variance
    a.singleton = "zero"  # advantage of a group of one: zero, or raw (its reward)
    a.post_scale = 1.0  # factor after the normalisation
    return a


def get_config() -> ConfigDict:
    """Dr. Free's parts and schedule with sizes for a small policy; not an experiment of its own.

    A method is a choice of parts by name: source, protocols, format score, gates, probe, reward
    terms, solver reward, advantages, schedule and refill. `configs/README.md` has the table.
    """
    c = ConfigDict()
    c.method = "dr_free"  # what the run is called; the fields below say what it does
    c.seed = 0  # of everything drawn: chains, tokens, shuffles

    c.world = ConfigDict()
    c.world.folder = ""  # a folder with entities, relations, triples, passages; "" is the atlas
    c.world.max_hops = 3  # longest chain, and most hops that a question is scored by

    c.source = ConfigDict()  # where seeds for the proposer, or labelled questions, come from
    c.source.kind = "chains"  # chains, chain_pool, documents, answers, references or labelled
    c.source.file = ""  # the pool, answers or questions; "" takes them from the world
    c.source.hop_weights = (4, 3, 2, 1)  # of 1, 2, … hops (documents, answers, references)
    c.source.most_characters = 1200  # a document is cut to so many characters

    # references (ZEST-Search): from a reference question to a target, to an evidence path.
    c.source.aliases = ""  # a jsonl of {"id", "names"}; "" takes the world's entities, if any
    c.source.known_targets = False  # a target has to be one of those entities
    c.source.target_protocol = "zest_target"  # how a target is asked for
    c.source.target_prompt = 256  # tokens of that prompt, at most
    c.source.target_length = 64  # tokens of the reply, at most
    c.source.documents = 5  # passages retrieved for a target, and for each entity before it
    c.source.support = 1  # of those, about something else, that have to name the target
    c.source.path = "linked"  # linked (by the sentences), written (by the proposer) or none
    c.source.path_protocol = "zest_path"  # written: how a path is asked for
    c.source.path_prompt = 3072  # written: tokens of that prompt, at most
    c.source.path_length = 512  # written: tokens of the reply, at most
    c.source.title_is_subject = False  # a document's title stands for the head in its sentences
    c.source.relation_words = 8  # words of a relation, at most
    c.source.rounds = 2  # how often new references are tried while a step wants seeds

    c.policy = ConfigDict()
    c.policy.folder = ""  # Hugging Face folder to start from; "" starts from random weights
    c.policy.width = 128  # residual width (the rest of this group is read only without a folder)
    c.policy.layers = 4  # transformer blocks
    c.policy.heads = 4  # query heads
    c.policy.kv_heads = 2  # key/value heads
    c.policy.head_dim = 32  # size of a head
    c.policy.mlp_width = 320  # hidden width of the feed-forward
    c.policy.dtype = "float32"  # compute type; what is trained is float32 always
    c.policy.chat = (
        False  # prompts as a user's turn of the tokenizer's chat template (instruct models)
    )
    c.policy.system = ""  # system message of that turn; "" leaves it to the template
    c.policy.shared = False  # one policy plays both roles (SSP); else each role has its own weights
    c.policy.attention = (
        "auto"  # auto (the machine's kernel, if it passes its test), xla, cudnn, splash
    )

    c.warm_start = ConfigDict()  # behaviour cloning before self-evolution
    c.warm_start.steps = 0  # most steps; 0 leaves it out
    c.warm_start.file = ""  # a jsonl of trajectories to imitate; "" imitates scripted episodes
    c.warm_start.sequences = 64  # episodes a step
    c.warm_start.learning_rate = 2e-3  # peak of a cosine to a tenth
    c.warm_start.warmup_steps = 50  # steps to the peak
    c.warm_start.stop_at_em = 1.0  # stops at this greedy exact match on the validation questions
    c.warm_start.stop_every = 100  # steps between looks at the validation questions
    c.warm_start.clean_steps = 0  # first steps with right scripts and real names only
    c.warm_start.solver = 0.6  # weight of search episodes among the scripts
    c.warm_start.reading = 0.1  # weight of answering from given passages
    c.warm_start.proposer = 0.3  # weight of question writing from a chain
    c.warm_start.document = 0.0  # weight of question writing from a document, with searches
    c.warm_start.backward = 0.0  # weight of question writing from an answer, with searches
    c.warm_start.target = 0.0  # weight of naming a target for a reference question
    c.warm_start.path = 0.0  # weight of question writing from an evidence path
    c.warm_start.renamed = 0.5  # share of scripts whose names are random strings
    c.warm_start.early_answer = 0.5  # share of search episodes that give up after the first search
    c.warm_start.wrong_field = 0.1  # share that read a wrong field of the passage
    c.warm_start.relation_query = 0.05  # share that search for a relation instead of a name
    c.warm_start.flawed_proposer = 0.5  # share of proposals that are bad questions

    c.retrieval = ConfigDict()
    c.retrieval.top_k = 1  # passages per search
    c.retrieval.text_weight = 0.3  # weight of the text's cosine beside the title's
    c.retrieval.dimension = 0  # size of the random projection of token ids; 0 is exact
    c.retrieval.index = ""  # an index folder, or a retrieval server's address; "" embeds the world
    c.retrieval.encoder = ""  # folder of an index's encoder, where it has moved
    c.retrieval.where = "auto"  # an index is searched: device (in the compiled rollout), host
    c.retrieval.query_length = 12  # tokens of a query that are embedded

    c.solver = ConfigDict()
    c.solver.narrowings = 0  # times that slots are halved when no prompt is left for them
    c.solver.protocol = "plain_search"  # how an episode is written
    c.solver.prompt_length = 32  # tokens of the longest prompt
    c.solver.action_length = 20  # tokens of one action
    c.solver.observation_length = 62  # tokens that one search may bring
    c.solver.searches = 3  # searches an episode may have
    c.solver.slots = 128  # episodes sampled at once
    c.solver.wait_fraction = 1.0  # share of the slots that must wait before decoding stops for them
    c.solver.reward = "exact_match"  # exact_match, strict_exact_match, f1, search_r1_format, …
    c.solver.tasks_per_step = 16  # questions of a step
    c.solver.group_size = 8  # rollouts per question
    c.solver.temperature = 1.0  # of sampling in training
    c.solver.learning_rate = 3e-4  # peak
    c.solver.warmup_steps = 5  # steps to the peak
    c.solver.decay = False  # cosine from the peak to a tenth over a phase, anew with new moments
    c.solver.max_grad_norm = 1.0  # gradients are scaled down to this norm
    c.solver.clip_low = 0.2  # ratio clip below 1
    c.solver.clip_high = 0.2  # ratio clip above 1
    c.solver.fresh_optimizer = True  # new moments at the start of every iteration
    c.solver.updates_per_batch = 1  # optimiser steps on the rollouts of one step
    c.solver.kl_weight = 0.0  # of the KL penalty toward the policy that training began with
    c.solver.kl_kind = "low_var_kl"  # its estimator: low_var_kl, k1 or k2
    c.solver.advantage = advantage("prompt")

    c.solver_reward = ConfigDict()  # options of the solver rewards
    c.solver_reward.structure_score = 0.2  # search_r1_format: a well-formed episode without success
    c.solver_reward.answer_score = 0.1  # search_r1_format: a wrong answer in an ill-formed episode
    c.solver_reward.retrieval_score = 0.0  # search_r1_format: the right answer was retrieved
    c.solver_reward.tool_form = "T1"  # tool_aware: T1, T2 or T3
    c.solver_reward.tool_cost = 0.3  # tool_aware: coefficient c
    c.solver_reward.tool_limit = (
        False  # tool_aware: M of T1 is the turn limit, not the group's most
    )
    c.solver_reward.tool_scale = 4  # tool_aware: K of T2, in searches
    c.solver_reward.waypoint_alpha = 0.3  # waypoint: most that a wrong answer can earn

    c.proposer = ConfigDict()
    c.proposer.folder = ""  # a policy of its own to start from; "" starts from the solver's
    c.proposer.chat = False  # of that policy, as policy.chat is of the solver's
    c.proposer.system = ""  # likewise
    c.proposer.protocol = "plain_proposer"  # how a proposal is written
    c.proposer.prompt_length = 256  # tokens of chain and passages
    c.proposer.action_length = 64  # tokens of thought, question and answer
    c.proposer.slots = 48  # proposals sampled at once
    c.proposer.observation_length = 62  # tokens that one of its searches may bring
    c.proposer.searches = 0  # searches a proposal may have; 0 for protocols without
    c.proposer.seeds_per_step = 48  # seeds (chains, documents, answers) of a step
    c.proposer.samples = 1  # proposals per seed in training
    c.proposer.format = "dr_free"  # format score: dr_free, dr_zero or pair
    c.proposer.gates = ("pair", "leakage", "target", "think", "grounded_beyond_source")  # in order
    c.proposer.frozen = False  # the proposer is never updated
    c.proposer.temperature = 1.0  # of sampling, in training and in generation
    c.proposer.learning_rate = 3e-4  # peak
    c.proposer.warmup_steps = 2  # steps to the peak
    c.proposer.decay = False  # cosine from the peak to a tenth over the first phase, then a tenth
    c.proposer.max_grad_norm = 1.0  # gradients are scaled down to this norm
    c.proposer.clip_low = 0.2  # ratio clip below 1
    c.proposer.clip_high = 0.2  # ratio clip above 1

    c.proposer.kl_weight = 0.0  # of the KL penalty toward the policy that training began with
    c.proposer.kl_kind = "low_var_kl"  # its estimator: low_var_kl, k1 or k2
    c.proposer.advantage = advantage("hop")

    c.gates = ConfigDict()  # options of the gates and format scores
    c.gates.min_words = 1  # length: words of a question, at least
    c.gates.max_words = 50  # length: at most
    c.gates.min_characters = 10  # length: characters of a question, at least
    c.gates.max_characters = 1000  # length: at most
    c.gates.answer_words = 10  # answer_length: words of an answer, at most
    c.gates.least_queries = 2  # distinct_queries: searches that a proposal must have made
    c.gates.rag_noise = 4  # rag: passages of other proposals among the evidence
    c.gates.rag_fail_open = False  # rag: a reader without an answer lets pass (published SSP code)
    c.gates.reading_length = 512  # rag, closed_book, teacher.kind=reader: tokens that are read
    c.gates.substring_match = False  # dr_zero format: "in" stands in "Berlin" (published code)

    c.probe = ConfigDict()  # solver rollouts that tell how hard a question is
    c.probe.model = "anchor"  # anchor (the previous solver), base, or solver (the live one)
    c.probe.rollouts = 5  # per question
    c.probe.temperature = 1.0  # of their sampling

    c.reward = ConfigDict()  # the proposer's: a weighted sum of terms
    c.reward.weights = ConfigDict()  # 0 leaves a term, and what only it needs, out
    c.reward.weights.format = 0.2  # format score
    c.reward.weights.information_gain = 1.0  # Dr. Free's likelihood contrast
    c.reward.weights.difficulty = 0.0  # the curve below
    c.reward.difficulty = "dr_zero"  # dr_zero, intermediate, failure, moving_bell, … (rewards/)
    c.reward.invalid = 0.0  # added where a gate refused; below 0 it can end all valid proposals
    c.reward.tau = 3.0  # bound of the information gain, in nats
    c.reward.squash = "a"  # a: tau tanh(gain / tau); b: tau tanh(gain)
    c.reward.without = ()  # shortcuts left out (ablation): none, source, one_shot, hop

    c.fallback = ConfigDict()  # EviBack: a teacher pays groups in which nobody is right
    c.fallback.enabled = False  # ask it
    c.fallback.beta = 0.1  # for evidence that supports an answer
    c.fallback.gamma = 0.1  # for the teacher's answer from it, times its F1
    c.fallback.lam = 0.1  # factor of such a group's advantages, after their normalisation

    c.teacher = ConfigDict()  # who is asked
    c.teacher.kind = "endpoint"  # endpoint (OpenAI-compatible), local (a policy), recorded, reader
    c.teacher.where = ""  # the endpoint's URL, the policy's folder, or the file of recorded answers
    c.teacher.model = ""  # endpoint: the model's name
    c.teacher.key_variable = "ZEST_TEACHER_API_KEY"  # endpoint: environment variable of the key
    c.teacher.prompts = ""  # a frozen prompt file; "" has the prompts of this package
    c.teacher.documents = 5  # passages shown of each search
    c.teacher.max_tokens = 512  # of an answer
    c.teacher.connections = 8  # endpoint: requests under way at once
    c.teacher.answer_s = 180.0  # endpoint: seconds to wait for an answer
    c.teacher.retries = 4  # endpoint: attempts after the first
    c.teacher.most_requests = 0  # endpoint: spending limit of the run; 0 for none
    c.teacher.most_tokens = 0  # endpoint: spending limit of the run; 0 for none
    c.teacher.most_unanswered = 1.0  # the run stops where a larger share stays unanswered

    c.schedule = ConfigDict()
    c.schedule.kind = "iterated"  # iterated, online (both roles a step) or labelled
    c.schedule.iterations = 3  # iterated: proposer phase, generation, solver phase; else 1
    c.schedule.proposer_steps = 50  # iterated: updates of a proposer phase
    c.schedule.solver_steps = 50  # updates of a solver phase; online and labelled: of the run
    c.schedule.tasks = 800  # iterated: questions generated per iteration
    c.schedule.max_seeds = 2000  # iterated: seeds that may be tried for them

    c.generation = ConfigDict()  # iterated: how the solver's questions are chosen
    c.generation.samples = 1  # proposals per seed, of which the best format is kept
    c.generation.keep_refused = False  # refused questions stay (published Dr. Zero code)
    c.generation.most_words = 0  # questions are cut to so many words; 0 does not cut

    c.refill = ConfigDict()  # online: what takes the place of refused proposals
    c.refill.kind = "none"  # none, dummy, resample, replay or seed
    c.refill.rounds = 2  # resample: how often new seeds are tried
    c.refill.period = 10  # replay: steps after which the pool is emptied
    c.refill.most_success = 1.0  # replay: highest success rate of a question taken again
    c.refill.file = ""  # seed: labelled questions

    c.training = ConfigDict()  # shape of packed micro-batches
    c.training.rows = 8  # rows of a micro-batch
    c.training.b2 = 0.98  # decay of Adam's second moment
    c.training.remat = "none"  # none, dots or full: what the backward pass keeps
    c.training.moments = "float32"  # float32 or int8: how Adam's moments are stored
    c.training.offload_idle = False  # moments of the role that waits go to pinned host memory
    c.training.lora = ConfigDict()  # adapters beside a frozen policy, shared by the roles
    c.training.lora.rank = 0  # of the adapters; 0 trains the whole policy
    c.training.lora.alpha = 16.0  # weight of the adapters, divided by the rank
    c.training.lora.targets = ("q", "k", "v", "o", "gate", "up", "down")  # matrices with adapters

    c.evaluation = ConfigDict()
    c.evaluation.tasks = ""  # measure the solver by these; "" takes the world's heldout.jsonl
    c.evaluation.draws = 10_000  # bootstrap draws
    c.evaluation.every_iteration = True  # also between the first and the last

    c.mesh = ConfigDict()  # how devices share a run; 0 everywhere chooses, -1 takes the rest
    c.mesh.data = 0  # copies of the weights, each with rows of its own
    c.mesh.fsdp = 0  # devices that share weights, moments and rows
    c.mesh.tensor = 0  # devices that share heads, features and vocabulary

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 20  # updates between checkpoints (and at the end of every phase)
    c.checkpoint.keep = 2  # newest checkpoints kept
    c.checkpoint.keep_best = True  # and the one of the best held-out EM; one more save an iteration
    c.checkpoint.asynchronous = True  # written while the run goes on, from a copy in host memory

    c.guards = ConfigDict()  # warnings (docs/guards.md); a bound of 0 turns its warning off
    c.guards.steps = 20  # steps that a warning looks back on, N
    c.guards.again = 100  # steps before the same warning is given again
    c.guards.reward_spread = 1e-6  # a mean reward that moved no more than this in N steps
    c.guards.kl = 0.2  # KL to the sampling policy, nats per token
    c.guards.kl_to_reference = 1.0  # KL to the reference of the penalty, nats per token
    c.guards.length_ratio = 2.0  # episodes so many times as long as at first, or as short
    c.guards.valid_share = 0.5  # the valid share, over its best
    c.guards.same_groups = 0.9  # share of groups all wrong, or all right, in each of N steps
    c.guards.entropy = 0.01  # nats per token
    c.guards.mismatch = 1.1  # exp of the difference between sampler's and trainer's log-probability
    c.guards.hit_limit = 0.5  # share of episodes that a limit cut off

    c.log = ConfigDict()
    c.log.rollouts_every = 10  # steps between samples of rollouts in the workdir

    c.control = ConfigDict()
    c.control.shuffle_rewards = False  # rewards go to random rollouts of the batch: must not learn
    return c
