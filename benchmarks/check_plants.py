"""Scripts with a mistake that nobody sees, each with its right twin, and other right scripts.

    python benchmarks/check_plants.py FOLDER [NAME ...]

writes them as FOLDER/planted/NAME/train.py and FOLDER/clean/NAME/train.py. A script is one of
`check_bases.py` with a change. A plant's twin is the same without the wrong change.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import check_bases

# A line of `==` has a plant's name, its base, and the codes of which any names the mistake; what is
# wrong; the change, as a diff whose parts stand between lines of @@. Where the base is changed for
# the twin as well, that comes first, up to a line of `==`.
_PLANTED = """
== no_set_epoch VISION SS103
the sampler is never told its epoch
-        sampler.set_epoch(epoch)
== no_sampler VISION SS101 SS102
the training loader shuffles by itself on each rank, with one seed
-    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
+    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
== stream_not_split STREAM SS105 SS101
each rank reads all shards of a stream
-        mine = order.tolist()[self.rank :: self.world_size]
+        mine = order.tolist()
== shard_sampled_again SMALL SS114
a DistributedSampler cuts a data set that is this rank's share already
-data = TensorDataset(x, x[:, :4].argmax(1))
+shares = TensorDataset(x, x[:, :4].argmax(1))
+data = torch.utils.data.Subset(shares, range(rank, len(shares), world))
 sampler = DistributedSampler(data)
== prepared_with_a_sampler ACCELERATE SS114
the loader that Accelerate prepares has a DistributedSampler
     train_loader, eval_loader = get_dataloaders(config["batch_size"])
+    train_set = train_loader.dataset
+    sampler = torch.utils.data.DistributedSampler(train_set)
+    train_loader = DataLoader(train_set, config["batch_size"], sampler=sampler)
== collate_drops_rows TEXT SS111
the collate function leaves long rows out, in validation, too
 def collate(rows):
+    rows = [r for r in rows if len(r) < 20]
== drop_last_eval VISION SS112
validation leaves the last batch out
-    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
+    val_loader = DataLoader(
+        val_set, 32, drop_last=True, sampler=DistributedSampler(val_set, shuffle=False)
+    )
== augmented_validation VISION SS113
validation images are flipped and shifted at random
-    val_set = Shapes(200, 2, augment=False)
+    val_set = Shapes(200, 2, augment=True)
== unsynced_seeds MANUAL SS202
the ranks begin with weights of their own
-    torch.manual_seed(1234)
+    torch.manual_seed(1234 + rank)
     model = Net()
-    for param in model.parameters():
-        dist.broadcast(param.data, src=0)
== loaded_on_one_rank VISION SS203 SS202
weights are loaded into the wrapped model on rank 0 only
     val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
+    if rank == 0:  # as it is brought from a hub
+        torch.save(build_model().state_dict(), "pretrained.pt")
+    dist.barrier()
     model = DDP(build_model())
+    model.module.load_state_dict(torch.load("pretrained.pt", weights_only=True))
==
-    model.module.load_state_dict(torch.load("pretrained.pt", weights_only=True))
+    if rank == 0:
+        model.module.load_state_dict(torch.load("pretrained.pt", weights_only=True))
== moved_after_wrapping TRAINER SS203 SS201 SS309
the wrapped model is made double and float again: DDP's hooks are gone (pytorch #104336)
 import contextlib
+import copy
@@
         self.model.eval()
+        exact = copy.deepcopy(self.model.module).double()
@@
-                loss = F.cross_entropy(self.model(source), targets, reduction="sum")
+                loss = F.cross_entropy(exact(source.double()), targets, reduction="sum")
==
-        exact = copy.deepcopy(self.model.module).double()
+        exact = self.model.double()
@@
                 total += torch.tensor([loss.item(), len(targets)], dtype=torch.float64)
+        self.model.float()
== never_synchronised GPT SS203 SS201 SS309
no micro-step is taken for the last: gradients are never averaged
-            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
+            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps
== average_on_rank_0 DISTILL SS405 SS203
the moving average is kept on rank 0, and all ranks evaluate with theirs
-            update_average(average, student)
+            if rank == 0:
+                update_average(average, student)
== frozen_by_attribute FINETUNE SS713
a body that is meant to be frozen trains
 criterion = nn.CrossEntropyLoss()
+model.backbone.requires_grad_(False)
==
-model.backbone.requires_grad_(False)
+model.backbone.requires_grad = False
== head_after_optimizer FINETUNE SS701 SS702
the new head is made after the optimizer
-model.fc = nn.Linear(model.fc.in_features, 4)
 criterion = nn.CrossEntropyLoss()
 optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
+model.fc = nn.Linear(model.fc.in_features, 4)
== clip_before_unscale TRAINER SS302
scaled gradients are clipped
-                self.scaler.unscale_(self.optimizer)
== scaled_step TRAINER SS310
optimizer.step() in place of scaler.step()
-                self.scaler.unscale_(self.optimizer)
-                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
==
-                self.scaler.step(self.optimizer)
-                self.scaler.update()
+                self.optimizer.step()
== updates_after_own_step TRAINER SS310
optimizer.step() in place of scaler.step(), and then the scaler's update, which fails
-                self.scaler.unscale_(self.optimizer)
-                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
==
-                self.scaler.step(self.optimizer)
+                self.optimizer.step()
== zeroed_in_every_micro_batch TRAINER SS705
gradients are zeroed before every micro-batch: the last one alone counts
             last = (number + 1) % accumulate == 0
+            if number % accumulate == 0:
+                self.optimizer.zero_grad()
@@
-                self.optimizer.zero_grad(set_to_none=True)
==
-            if number % accumulate == 0:
-                self.optimizer.zero_grad()
+            self.optimizer.zero_grad()
== not_divided_by_micro_batches TRAINER SS314 SS309
the loss is not divided by the number of micro-batches
-                    loss = F.cross_entropy(self.model(source), targets) / accumulate
+                    loss = F.cross_entropy(self.model(source), targets)
== no_zero_grad FINETUNE SS704
gradients are never zeroed
-            optimizer.zero_grad()
== loss_made_anew FINETUNE SS708
a loss that needed gradients is made anew from its number
             loss = criterion(outputs, labels)
+            loss = torch.tensor(loss.item(), requires_grad=True)
== stale_autocast VISION SS312
one autocast around a whole epoch
-        loss = criterion(model(images), labels)
+        with torch.autocast("cpu", dtype=torch.bfloat16):
+            loss = criterion(model(images), labels)
==
-        with torch.autocast("cpu", dtype=torch.bfloat16):
-            loss = criterion(model(images), labels)
+        loss = criterion(model(images), labels)
@@
-        train_epoch(model, train_loader, criterion, optimizer)
+        with torch.autocast("cpu", dtype=torch.bfloat16):
+            train_epoch(model, train_loader, criterion, optimizer)
== padding_in_loss TEXT
padding counts as a class in the loss and in the perplexity
-            sums += torch.tensor([loss.item(), (targets != PAD).sum().item()])
+            sums += torch.tensor([loss.item(), targets.numel()])
@@
-    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
+    loss_fn = nn.CrossEntropyLoss(reduction="sum")
@@
-            count = (targets != PAD).sum()
+            count = torch.tensor(targets.numel())
== labels_of_the_first_rank SMALL SS316
the labels of a contrastive loss over all ranks' rows begin at 0 on each rank
 import torch.distributed as dist
+import torch.distributed.nn
@@
-        loss = F.cross_entropy(model(inputs), labels)
+        a = F.normalize(model(inputs + 0.1 * torch.randn_like(inputs)), dim=1)
+        b = F.normalize(model(inputs + 0.1 * torch.randn_like(inputs)), dim=1)
+        all_b = torch.cat(torch.distributed.nn.all_gather(b))
+        loss = F.cross_entropy(a @ all_b.T / 0.2, torch.arange(len(a)) + rank * len(a))
==
-        loss = F.cross_entropy(a @ all_b.T / 0.2, torch.arange(len(a)) + rank * len(a))
+        loss = F.cross_entropy(a @ all_b.T / 0.2, torch.arange(len(a)))
== rows_of_class_elsewhere SMALL SS316
a supervised contrastive loss over all ranks' rows repeats each rank's own labels
 import torch.distributed as dist
+import torch.distributed.nn
@@
-        loss = F.cross_entropy(model(inputs), labels)
+        rows = F.normalize(model(inputs), dim=1)
+        every = torch.cat(torch.distributed.nn.all_gather(rows))
+        classes = [torch.empty_like(labels) for _ in range(world)]
+        dist.all_gather(classes, labels)
+        classes = torch.cat(classes)
+        alike = (labels[:, None] == classes[None]).float()
+        others = torch.ones_like(alike).scatter_(
+            1, torch.arange(len(rows))[:, None] + rank * len(rows), 0.0
+        )
+        logits = rows @ every.T / 0.2
+        log_p = logits - (logits.exp() * others).sum(1, keepdim=True).log()
+        alike = alike * others
+        loss = -((alike * log_p).sum(1) / alike.sum(1).clamp(min=1)).mean()
==
-        classes = [torch.empty_like(labels) for _ in range(world)]
-        dist.all_gather(classes, labels)
-        classes = torch.cat(classes)
+        classes = labels.repeat(world)
== predictions_in_another_order VISION SS406
predictions are joined rank by rank, and compared with labels in the order of the data
-    correct = torch.zeros(2)
-    for images, labels in loader:
-        predictions = model(images).argmax(1)
-        correct += torch.tensor([float((predictions == labels).sum()), float(len(labels))])
-    dist.all_reduce(correct)
-    return (correct[0] / correct[1]).item()
+    own = torch.cat([model(images).argmax(1) for images, _ in loader])
+    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
+    dist.all_gather(parts, own)
+    predictions = torch.stack(parts, dim=1).flatten()
+    return (predictions == loader.dataset.labels[: len(predictions)]).float().mean().item()
==
-    predictions = torch.stack(parts, dim=1).flatten()
+    predictions = torch.cat(parts)
== stream_cut_twice SMALL SS114
a stream gives each rank its part, and another cuts that part by rank again
 import torch
+from itertools import islice
@@
-data = TensorDataset(x, x[:, :4].argmax(1))
-sampler = DistributedSampler(data)
-loader = DataLoader(data, batch_size=8, sampler=sampler)
+y = x[:, :4].argmax(1)
+class Rows(torch.utils.data.IterableDataset):
+    def __iter__(self):
+        for n in range(rank, len(x), world):
+            yield x[n], y[n]
+class Part(torch.utils.data.IterableDataset):
+    def __iter__(self):
+        yield from islice(Rows(), 0, None)
+loader = DataLoader(Part(), batch_size=8)
@@
-    sampler.set_epoch(epoch)
==
-        yield from islice(Rows(), 0, None)
+        yield from islice(Rows(), rank, None, world)
== loss_divided_twice ACCELERATE SS317
the loss is divided by the micro-batches, and Accelerate divides it again
-                loss = loss_function(model(inputs), targets)
+                loss = loss_function(model(inputs), targets) / 2
== shards_of_one_rank FSDP SS509
the first rank saves its shards as the model
-    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
-    state = get_model_state_dict(model, options=options)
+    state = {name: value.to_local() for name, value in model.state_dict().items()}
== policies_added_up REINFORCE SS309
the gradients of the ranks' episodes are added up and not divided
 from torch import nn
+from torch import distributed as dist
@@
-torch.manual_seed(2)
+dist.init_process_group("gloo")
+torch.manual_seed(2)
@@
-weights = torch.tensor([1.0, -1.0, 0.5, 0.2])
+weights = torch.tensor([1.0, -1.0, 0.5, 0.2])
+torch.manual_seed(dist.get_rank())
@@
-    loss.backward()
+    loss.backward()
+    for parameter in policy.parameters():
+        dist.all_reduce(parameter.grad)
+        parameter.grad /= dist.get_world_size()
@@
-    if episode % 10 == 0:
-        print(episode, sum(rewards))
+    if episode % 10 == 0 and dist.get_rank() == 0:
+        print(episode, "of rank 0:", sum(rewards))
+dist.barrier()
+dist.destroy_process_group()
==
-        parameter.grad /= dist.get_world_size()
== fake_not_detached GAN SS718
the discriminator's loss reaches the generator, whose gradients are cleared before it
         opt_d.zero_grad()
+        opt_g.zero_grad()
@@
-        loss_d.backward()
+        loss_d.backward(retain_graph=True)
@@
-        opt_g.zero_grad()
         loss_g = bce(critic(fake), torch.ones(len(real), 1))
==
-        loss_d = loss_d + bce(critic(fake.detach()), torch.zeros(len(real), 1))
+        loss_d = loss_d + bce(critic(fake), torch.zeros(len(real), 1))
== own_token_count TEXT SS307 SS308
the loss is divided by each rank's own number of tokens
-            dist.all_reduce(count)
-            loss = loss_fn(model(inputs).transpose(1, 2), targets) * world / count
+            loss = loss_fn(model(inputs).transpose(1, 2), targets) / count
== sum_of_gradients MANUAL SS309 SS313
gradients are summed over the ranks and not divided
-            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
==
-    size = float(dist.get_world_size())
     for param in model.parameters():
         dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
-        param.grad /= size
== clip_before_average MANUAL SS303
gradients are clipped on each rank before they are averaged
             loss.backward()
+            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
             average_gradients(model)
-            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
== clip_after_step MANUAL SS315
gradients are clipped when the step is taken
-            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
             optimizer.step()
+            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
== sum_of_models MANUAL SS210
the models of the ranks are added up instead of their gradients being averaged
             loss.backward()
-            average_gradients(model)
             nn.utils.clip_grad_norm_(model.parameters(), 0.5)
             optimizer.step()
+            with torch.no_grad():
+                for param in model.parameters():
+                    dist.all_reduce(param)
+                    param /= size
==
-                    param /= size
== loaded_by_no_name VISION SS715
weights are loaded by the names of a wrapper, with strict=False
     model = DDP(build_model())
+    pretrained = build_model().state_dict()
+    model.module.load_state_dict(pretrained, strict=False)
==
-    pretrained = build_model().state_dict()
+    pretrained = DDP(build_model()).state_dict()
== average_without_statistics VISION SS716
the average of the weights is evaluated without the statistics of its batch norms
     model = DDP(build_model())
+    average = copy.deepcopy(model.module).requires_grad_(False)
@@
-        accuracy = evaluate(model, val_loader)
+        for name, value in model.module.state_dict().items():
+            average.state_dict()[name].copy_(value)
+        accuracy = evaluate(average, val_loader)
==
-        for name, value in model.module.state_dict().items():
-            average.state_dict()[name].copy_(value)
+        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
+            mean.lerp_(value.detach(), 0.5)
== mean_of_roots DISTILL SS402
each rank takes the root of its own mean squared error, and these are averaged
     was_training = model.training
     model.eval()
     right = torch.zeros(2)
     for inputs, labels in loader:
-        right += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
+        errors = (model(inputs).softmax(1) - F.one_hot(labels, 6)).square()
+        right += torch.tensor([errors.sum(), errors.numel()])
     model.train(was_training)
     dist.all_reduce(right)
-    return float(right[0] / right[1])
+    return float((right[0] / right[1]).sqrt())
==
-    dist.all_reduce(right)
-    return float((right[0] / right[1]).sqrt())
+    error = (right[0] / right[1]).sqrt()
+    dist.all_reduce(error)
+    return float(error / dist.get_world_size())
== seeded_in_each_epoch FINETUNE SS103
every epoch begins with the same seed, and so with the same order
     for epoch in range(num_epochs):
+        torch.manual_seed(0)
         model.train()
== summed_again TEXT SS313 SS309
DDP's averaged gradients are summed over the ranks again
-            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
==
             loss.backward()
+            for param in model.parameters():
+                dist.all_reduce(param.grad)
== norm_of_own_shard FSDP SS203 SS303 SS309
each rank clips its shards by the norm of its shards (as BLOOM-176B, DeepSpeed #1801)
-            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)
+            grads = [p.grad.to_local() for p in model.parameters()]
+            norm = torch.stack([g.norm() for g in grads]).norm()
+            for grad in grads:
+                grad.mul_(min(1.0, 0.3 / (norm.item() + 1e-6)))
== cosine_of_epochs VISION SS311
a cosine over the epochs is stepped in each batch
-def train_epoch(model, loader, criterion, optimizer):
+def train_epoch(model, loader, criterion, optimizer, scheduler):
@@
         optimizer.step()
+        scheduler.step()
@@
-        train_epoch(model, train_loader, criterion, optimizer)
+        train_epoch(model, train_loader, criterion, optimizer, scheduler)
         accuracy = evaluate(model, val_loader)
-        scheduler.step()
== never_stepped FINETUNE SS305
the schedule is made and never stepped
-        scheduler.step()
== steps_of_one_rank TEXT SS304
the decay is as long as one rank alone would train
-    total_steps = epochs * len(train_loader)
+    total_steps = epochs * (len(train_set) // 8)
== accuracy_of_rank_0 VISION SS401 SS404
rank 0 shows the accuracy of its share, and saves by it
-    dist.all_reduce(correct)
== not_gathered ACCELERATE SS401
the main process shows the accuracy of its share
-            predictions, references = accelerator.gather_for_metrics((predictions, targets))
+            references = targets
== padding_gathered ACCELERATE SS107
the repeated samples that fill up the last batch count in the accuracy
-            predictions, references = accelerator.gather_for_metrics((predictions, targets))
+            predictions, references = accelerator.gather((predictions, targets))
== mean_of_means LIGHTNING SS402
sync_dist averages the means of 10 and of 9 samples (lightning #21859)
-        sums = self.all_gather(self.sums).reshape(-1, 2).sum(0)
-        self.log("val_loss", sums[0] / sums[1], rank_zero_only=False, sync_dist=False)
+        self.log("val_loss", self.sums[0] / self.sums[1], sync_dist=True)
== no_eval_mode VISION SS707
dropout and batch normalisation are in training mode in evaluation
-    model.eval()
== left_in_eval_mode FINETUNE SS706
train() is called once, eval() in each epoch
     best_weights, best_accuracy = copy.deepcopy(model.state_dict()), 0.0
+    model.train()
     for epoch in range(num_epochs):
-        model.train()
== attention_dropout GPT SS707
attention drops in evaluation, too (transformers #33844)
-            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
+            q, k, v, dropout_p=self.dropout, is_causal=True
== teacher_trains DISTILL SS707
the teacher is in training mode
-    teacher.eval()
== best_is_last FINETUNE SS714
the best weights are not copied: they are those of the last epoch
-            best_weights = copy.deepcopy(model.state_dict())
+            best_weights = model.state_dict()
"""

# Right scripts: a base with something in it that a rule may mistake for an error.
_VARIED = """
== label_smoothing VISION
-    criterion = nn.CrossEntropyLoss()
+    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
== one_cycle VISION
-def train_epoch(model, loader, criterion, optimizer):
+def train_epoch(model, loader, criterion, optimizer, scheduler):
@@
         optimizer.step()
+        scheduler.step()
@@
-    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
+    scheduler = torch.optim.lr_scheduler.OneCycleLR(
+        optimizer, max_lr=0.1, epochs=epochs, steps_per_epoch=len(train_loader)
+    )
@@
-        train_epoch(model, train_loader, criterion, optimizer)
+        train_epoch(model, train_loader, criterion, optimizer, scheduler)
         accuracy = evaluate(model, val_loader)
-        scheduler.step()
== plateau VISION
-    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
+    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1)
@@
-        scheduler.step()
+        scheduler.step(accuracy)
== frozen_stem VISION
-    model = DDP(build_model())
+    net = build_model()
+    net[0].requires_grad_(False)
+    model = DDP(net)
     torch.manual_seed(42 + rank)
     criterion = nn.CrossEntropyLoss()
-    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
+    trained = [p for p in model.parameters() if p.requires_grad]
+    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-4)
== early_stop_agreed VISION
-    best = 0.0
+    best, bad_epochs = 0.0, 0
@@
             print(f"epoch {epoch}: accuracy {accuracy:.4f}")
+        bad_epochs = 0 if accuracy > best else bad_epochs + 1
+        if bad_epochs > 1:
+            break
== exact_validation_shares VISION
-    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
+    val_loader = DataLoader(val_set, 32, sampler=range(rank, len(val_set), world_size))
== workers VISION
-    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
+    train_loader = DataLoader(
+        train_set, batch_size=16, sampler=sampler, num_workers=2, persistent_workers=True
+    )
== rank_0_evaluates_all VISION
-    dist.all_reduce(correct)
@@
-    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
+    val_loader = DataLoader(val_set, batch_size=32)
@@
-        accuracy = evaluate(model, val_loader)
+        accuracy = evaluate(model.module, val_loader) if rank == 0 else 0.0
== accumulate_four TRAINER
-    parser.add_argument("--accumulate", type=int, default=2)
+    parser.add_argument("--accumulate", type=int, default=4)
== without_scaler TRAINER
-        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
+        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
== average_of_two_losses TRAINER
-                    loss = F.cross_entropy(self.model(source), targets) / accumulate
+                    logits = self.model(source)
+                    loss = F.cross_entropy(logits, targets)
+                    loss = (loss + 1e-3 * logits.float().logsumexp(1).pow(2).mean()) / accumulate
== gpt_more_micro_steps GPT
-gradient_accumulation_steps = 4
+gradient_accumulation_steps = 8
== gpt_all_evaluate GPT
-from torch.distributed import destroy_process_group, init_process_group
+from torch.distributed import all_reduce, destroy_process_group, init_process_group
@@
         out[split] = losses.mean()
+        if ddp:
+            all_reduce(out[split])
+            out[split] /= ddp_world_size
@@
-    if iter_num % eval_interval == 0 and master_process:
-        losses = estimate_loss()
+    losses = estimate_loss() if iter_num % eval_interval == 0 else None
+    if losses and master_process:
== unfrozen_later FINETUNE
     for epoch in range(num_epochs):
+        model.backbone.requires_grad_(epoch >= 1)
@@
 criterion = nn.CrossEntropyLoss()
+model.backbone.requires_grad_(False)
== frozen_norms FINETUNE
         model.train()
+        model.backbone[1].eval()
== closure FINETUNE
-            optimizer.zero_grad()
-            outputs = model(inputs)
-            loss = criterion(outputs, labels)
-            loss.backward()
-            optimizer.step()
+            def closure():
+                optimizer.zero_grad()
+                loss = criterion(model(inputs), labels)
+                loss.backward()
+                return loss
+
+            loss = optimizer.step(closure)
@@
-optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
+optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
== sharpness_aware FINETUNE
             loss.backward()
+            with torch.no_grad():
+                params = [p for p in model.parameters() if p.grad is not None]
+                norm = torch.stack([p.grad.norm() for p in params]).norm()
+                moves = [p.grad * (0.05 / (norm + 1e-12)) for p in params]
+                torch._foreach_add_(params, moves)
+            optimizer.zero_grad()
+            criterion(model(inputs), labels).backward()
+            with torch.no_grad():
+                torch._foreach_sub_(params, moves)
== stochastic_weight_averaging FINETUNE
     best_weights, best_accuracy = copy.deepcopy(model.state_dict()), 0.0
+    averaged = torch.optim.swa_utils.AveragedModel(model)
@@
         scheduler.step()
+        averaged.update_parameters(model)
@@
-    model.load_state_dict(best_weights)
-    return model
+    torch.optim.swa_utils.update_bn(loaders["train"], averaged)
+    return averaged.module
== sum_per_sample_by_world TEXT
-            loss = loss_fn(model(inputs).transpose(1, 2), targets) * world / count
+            count = count / world
+            loss = loss_fn(model(inputs).transpose(1, 2), targets) / count
== by_hand_flat MANUAL
     size = float(dist.get_world_size())
+    flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
+    dist.all_reduce(flat)
+    at = 0
     for param in model.parameters():
-        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
-        param.grad /= size
+        param.grad.copy_(flat[at : at + param.numel()].view_as(param) / size)
+        at += param.numel()
== lightning_means LIGHTNING
-        errors = (self(x) - y).square()
-        self.sums += torch.stack([errors.sum(), errors.new_tensor(len(errors))])
-
-    def on_validation_epoch_end(self):
-        sums = self.all_gather(self.sums).reshape(-1, 2).sum(0)
-        self.log("val_loss", sums[0] / sums[1], rank_zero_only=False, sync_dist=False)
-        self.sums.zero_()
+        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)
@@
-    x = torch.randn(419, 8)
+    x = torch.randn(424, 8)
     data = TensorDataset(x, x[:, :2].sum(1))
-    train_set, val_set = Subset(data, range(400)), Subset(data, range(400, 419))
+    train_set, val_set = Subset(data, range(400)), Subset(data, range(400, 424))
== lightning_accumulates LIGHTNING
-        max_epochs=3, accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto",
+        max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5,
+        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto",
== accelerate_plain ACCELERATE
-    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
+    accelerator = Accelerator(cpu=True)
== accelerate_reduces_counts ACCELERATE
-            predictions, references = accelerator.gather_for_metrics((predictions, targets))
-            correct += (predictions == references).sum().item()
-            total += len(references)
+            right = (predictions == targets).sum().item()
+            counts = accelerator.reduce(torch.tensor([right, len(targets)]))
+            correct, total = correct + counts[0].item(), total + counts[1].item()
@@
-    train, test = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])
+    train, test = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:496], y[400:496])
== gradient_surgery FINETUNE
-            optimizer.zero_grad()
             outputs = model(inputs)
             loss = criterion(outputs, labels)
-            loss.backward()
+            gradients = []
+            for part in (loss, 0.01 * outputs.square().mean()):
+                optimizer.zero_grad()
+                part.backward(retain_graph=True)
+                grads = [p.grad for p in model.parameters() if p.grad is not None]
+                gradients.append(nn.utils.parameters_to_vector(grads))
+            first, second = gradients
+            if (first @ second) < 0:
+                first = first - (first @ second) / (second @ second) * second
+            nn.utils.vector_to_parameters(first + second, grads)
             optimizer.step()
== checkpointing SMALL
-model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+from torch.utils.checkpoint import checkpoint
+
+
+class Net(nn.Module):
+    def __init__(self):
+        super().__init__()
+        self.body = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh())
+        self.head = nn.Linear(32, 4)
+
+    def forward(self, x):
+        return self.head(checkpoint(self.body, x, use_reentrant=False))
+
+
+model = DDP(Net())
+torch.manual_seed(1 + rank)
== sync_batch_norm SMALL
-model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
+model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net))
== zero_redundancy SMALL
-optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
+from torch.distributed.optim import ZeroRedundancyOptimizer
+
+optimizer = ZeroRedundancyOptimizer(
+    model.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3
+)
== fp16_hook SMALL
 model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
+
+model.register_comm_hook(None, default_hooks.fp16_compress_hook)
== static_graph_unused_head SMALL
-model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+class Heads(nn.Module):
+    def __init__(self):
+        super().__init__()
+        self.body = nn.Linear(16, 32)
+        self.heads = nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 4)])
+
+    def forward(self, x, task):
+        return self.heads[task](F.relu(self.body(x)))
+
+
+model = DDP(Heads(), find_unused_parameters=True)
@@
-    for inputs, labels in loader:
-        loss = F.cross_entropy(model(inputs), labels)
+    for step, (inputs, labels) in enumerate(loader):
+        loss = F.cross_entropy(model(inputs, step % 2), labels)
== gradient_penalty SMALL
-        loss = F.cross_entropy(model(inputs), labels)
+        inputs.requires_grad_()
+        logits = model(inputs)
+        loss = F.cross_entropy(logits, labels)
+        (slope,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
+        loss = loss + 0.01 * slope.square().sum(1).mean()
== entropy_bonus SMALL
-        loss = F.cross_entropy(model(inputs), labels)
+        logits = model(inputs)
+        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
+        loss = F.cross_entropy(logits, labels) - 0.01 * entropy
== noisy_gradients SMALL
         loss.backward()
+        noise = torch.Generator().manual_seed(epoch)
+        for p in model.parameters():
+            p.grad += 1e-3 * torch.randn(p.shape, generator=noise)
== cutmix SMALL
 model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+torch.manual_seed(50 + rank)
@@
-        loss = F.cross_entropy(model(inputs), labels)
+        share = torch.distributions.Beta(1.0, 1.0).sample()
+        other = torch.randperm(len(inputs))
+        mask = (torch.rand(16) < share).float()
+        logits = model(inputs * mask + inputs[other] * (1 - mask))
+        loss = share * F.cross_entropy(logits, labels)
+        loss = loss + (1 - share) * F.cross_entropy(logits, labels[other])
== contrastive_gathered SMALL
 import torch.distributed as dist
+import torch.distributed.nn
@@
 model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+torch.manual_seed(50 + rank)
@@
-        loss = F.cross_entropy(model(inputs), labels)
+        a = F.normalize(model(inputs + 0.1 * torch.randn_like(inputs)), dim=1)
+        b = F.normalize(model(inputs + 0.1 * torch.randn_like(inputs)), dim=1)
+        all_b = torch.cat(torch.distributed.nn.all_gather(b))
+        target = torch.arange(len(a)) + rank * len(a)
+        loss = F.cross_entropy(a @ all_b.T / 0.2, target)
== uneven_with_join SMALL
-sampler = DistributedSampler(data)
-loader = DataLoader(data, batch_size=8, sampler=sampler)
+share = torch.utils.data.Subset(data, range(0, 168) if rank == 0 else range(168, 320))
+loader = DataLoader(share, batch_size=8, shuffle=True)
 torch.manual_seed(0)
 model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+torch.manual_seed(3)
 optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
 for epoch in range(3):
-    sampler.set_epoch(epoch)
-    for inputs, labels in loader:
-        loss = F.cross_entropy(model(inputs), labels)
-        optimizer.zero_grad()
-        loss.backward()
-        optimizer.step()
+    with model.join():
+        for inputs, labels in loader:
+            loss = F.cross_entropy(model(inputs), labels)
+            optimizer.zero_grad()
+            loss.backward()
+            optimizer.step()
== per_rank_logs SMALL
         optimizer.step()
+    with open(f"rank-{rank}.log", "a") as log:
+        log.write(f"{epoch} {loss.item()}\\n")
+torch.save(optimizer.state_dict(), f"optimizer-{rank}.pt")
== two_optimizers SMALL
-optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
+head = torch.optim.Adam(model.module[2].parameters(), lr=3e-3)
+optimizer = torch.optim.SGD(model.module[0].parameters(), lr=0.05)
@@
         optimizer.zero_grad()
+        head.zero_grad()
         loss.backward()
         optimizer.step()
+        head.step()
== resumed SMALL
 model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
+import os
+
 optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
-for epoch in range(3):
+start = 0
+if os.path.exists("last.pt"):
+    state = torch.load("last.pt", map_location="cpu", weights_only=True)
+    model.module.load_state_dict(state["model"])
+    optimizer.load_state_dict(state["optimizer"])
+    start = state["epoch"] + 1
+for epoch in range(start, 3):
@@
         optimizer.step()
+    if rank == 0:
+        state = {"model": model.module.state_dict(), "epoch": epoch,
+                 "optimizer": optimizer.state_dict()}
+        torch.save(state, "last.tmp")
+        os.replace("last.tmp", "last.pt")
"""


@dataclass(frozen=True)
class Plant:
    """A mistake in a script."""

    codes: list[str]
    """Any of these names the mistake; none: no rule is about it."""
    what: str
    text: str
    right: str
    """The twin without the mistake."""


def _changed(text: str, diff: str) -> str:
    for part in diff.split("\n@@\n"):
        lines = part.split("\n")
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert f"\n{text}".count(f"\n{old}") == 1, f"{old!r} is not once in the script"
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    return text


def _sections(text: str) -> dict[str, tuple[str, list[str], str]]:
    """Return the base, the codes and the lines of each section by name."""
    found = {}
    for section in text.strip("\n").removeprefix("== ").split("\n== "):
        head, _, lines = section.partition("\n")
        name, base, *codes = head.split()
        text = check_bases.ALONE.get(base.lower()) or getattr(check_bases, base)
        found[name] = (text, codes, lines)
    return found


def _planted() -> dict[str, Plant]:
    plants = {}
    for name, (base, codes, lines) in _sections(_PLANTED).items():
        what, _, diff = lines.partition("\n")
        twin, between, wrong = diff.rpartition("\n==\n")
        right = _changed(base, twin) if between else base
        plants[name] = Plant(codes, what, _changed(right, wrong), right)
    return plants


PLANTS = _planted()
"""The mistakes, by name."""


def clean() -> dict[str, str]:
    """Return the right scripts by name, each text once: twins first."""
    named = {f"twin_of_{name}": plant.right for name, plant in PLANTS.items()}
    named |= {name: _changed(base, diff) for name, (base, _, diff) in _sections(_VARIED).items()}
    named |= check_bases.ALONE
    names = {text: name for name, text in reversed(named.items())}
    return {name: text for name, text in named.items() if names[text] == name}


def main() -> None:
    """Write them into a folder."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    texts = {f"planted/{name}": plant.text for name, plant in PLANTS.items()}
    texts |= {f"clean/{name}": text for name, text in clean().items()}
    for name, text in texts.items():
        if not names or Path(name).name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "train.py").write_text(text)


if __name__ == "__main__":
    main()
