"""Defaults of every field, each with what it means; experiments start from these and change a
few."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Dr. Free's schedule with sizes for a small policy; not an experiment of its own."""
    c = ConfigDict()
    c.method = "dr_free"  # what the proposer is paid for; the only one so far
    c.seed = 0  # of everything drawn: chains, tokens, shuffles

    c.world = ConfigDict()
    c.world.folder = ""  # a folder with entities, relations, triples, passages; "" is the atlas
    c.world.max_hops = 3  # longest chain

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
    c.warm_start.proposer = 0.3  # weight of question writing
    c.warm_start.renamed = 0.5  # share of scripts whose names are random strings
    c.warm_start.early_answer = 0.5  # share of search episodes that give up after the first search
    c.warm_start.wrong_field = 0.1  # share that read a wrong field of the passage
    c.warm_start.relation_query = 0.05  # share that search for a relation instead of a name
    c.warm_start.flawed_proposer = 0.5  # share of proposals that are bad questions

    c.retrieval = ConfigDict()
    c.retrieval.top_k = 1  # passages per search
    c.retrieval.text_weight = 0.3  # weight of the text's cosine beside the title's
    c.retrieval.dimension = 0  # size of the random projection of token ids; 0 is exact
    c.retrieval.query_length = 12  # tokens of a query that are embedded

    c.solver = ConfigDict()
    c.solver.protocol = "plain_search"  # how an episode is written
    c.solver.prompt_length = 32  # tokens of the longest prompt
    c.solver.action_length = 20  # tokens of one action
    c.solver.observation_length = 62  # tokens that one search may bring
    c.solver.searches = 3  # searches an episode may have
    c.solver.slots = 128  # episodes sampled at once
    c.solver.wait_fraction = 1.0  # share of the slots that must wait before decoding stops for them
    c.solver.tasks_per_step = 16  # questions of a step
    c.solver.group_size = 8  # rollouts per question
    c.solver.temperature = 1.0  # of sampling in training
    c.solver.learning_rate = 3e-4  # peak
    c.solver.warmup_steps = 5  # steps to the peak
    c.solver.decay = False  # cosine from the peak to a tenth over each iteration's phase
    c.solver.max_grad_norm = 1.0  # gradients are scaled down to this norm
    c.solver.clip_low = 0.2  # ratio clip below 1
    c.solver.clip_high = 0.2  # ratio clip above 1
    c.solver.fresh_optimizer = True  # new moments at the start of every iteration

    c.proposer = ConfigDict()
    c.proposer.protocol = "plain_proposer"  # how a proposal is written
    c.proposer.prompt_length = 256  # tokens of chain and passages
    c.proposer.action_length = 64  # tokens of thought, question and answer
    c.proposer.slots = 48  # proposals sampled at once
    c.proposer.chains_per_step = 48  # chains of a step, one proposal each
    c.proposer.temperature = 1.0  # of sampling, in training and in generation
    c.proposer.learning_rate = 3e-4  # peak
    c.proposer.warmup_steps = 2  # steps to the peak
    c.proposer.decay = False  # cosine from the peak to a tenth over one phase's length
    c.proposer.max_grad_norm = 1.0  # gradients are scaled down to this norm
    c.proposer.clip_low = 0.2  # ratio clip below 1
    c.proposer.clip_high = 0.2  # ratio clip above 1

    c.reward = ConfigDict()  # Dr. Free's proposer reward
    c.reward.format_weight = 0.2  # lambda
    c.reward.tau = 3.0  # bound of the information gain, in nats
    c.reward.squash = "a"  # a: tau tanh(gain / tau); b: tau tanh(gain)
    c.reward.without = ()  # shortcuts left out (ablation): none, source, one_shot, hop

    c.schedule = ConfigDict()
    c.schedule.iterations = 3  # proposer phase, generation, solver phase
    c.schedule.proposer_steps = 50  # updates of a proposer phase
    c.schedule.solver_steps = 50  # updates of a solver phase
    c.schedule.tasks = 800  # questions generated per iteration
    c.schedule.max_chains = 2000  # chains that may be tried for them

    c.training = ConfigDict()  # shape of packed micro-batches
    c.training.rows = 8  # rows of a micro-batch
    c.training.b2 = 0.98  # decay of Adam's second moment
    c.training.remat = "none"  # none, dots or full: what the backward pass keeps
    c.training.moments = "float32"  # float32 or int8: how Adam's moments are stored
    c.training.lora = ConfigDict()  # adapters beside a frozen policy, shared by the roles
    c.training.lora.rank = 0  # of the adapters; 0 trains the whole policy
    c.training.lora.alpha = 16.0  # weight of the adapters, divided by the rank
    c.training.lora.targets = ("q", "k", "v", "o", "gate", "up", "down")  # matrices with adapters

    c.evaluation = ConfigDict()
    c.evaluation.draws = 10_000  # bootstrap draws
    c.evaluation.every_iteration = True  # also between the first and the last

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 20  # updates between checkpoints (and at the end of every phase)
    c.checkpoint.keep = 2  # newest checkpoints kept

    c.log = ConfigDict()
    c.log.rollouts_every = 10  # steps between samples of rollouts in the workdir

    c.control = ConfigDict()
    c.control.shuffle_rewards = False  # rewards go to random rollouts of the batch: must not learn
    return c
