BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('r0002');
CREATE TABLE boot_sequences (
	recipe_digest VARCHAR(71) NOT NULL, 
	sequence BIGINT NOT NULL, 
	CONSTRAINT pk_boot_sequences PRIMARY KEY (recipe_digest)
);
INSERT INTO "boot_sequences" VALUES('sha256:9f982c3078a261fc2e3f7043001034a11004b62539f2db03c2f7bd5d4f49e2af',1);
CREATE TABLE build_failures (
	id INTEGER NOT NULL, 
	recipe TEXT NOT NULL, 
	method TEXT NOT NULL, 
	case_name TEXT NOT NULL, 
	rank INTEGER NOT NULL, 
	toolchain VARCHAR(71) NOT NULL, 
	error TEXT NOT NULL, 
	log_path TEXT, 
	failed_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	CONSTRAINT pk_build_failures PRIMARY KEY (id), 
	CONSTRAINT uq_build_failures_recipe_method_case_name_rank_toolchain UNIQUE (recipe, method, case_name, rank, toolchain)
);
INSERT INTO "build_failures" VALUES(1,'tiny-decoder','main_decode','b8',0,'sha256:e7d942ed8c5aa03c763445fdc9c756c9b23cf8f1672eeb830d7b8ae9a43d4f84','the compiler''s text
in two lines','logs/build.log','2026-03-01 12:00:00.000000','2026-03-01 13:00:00.000000');
CREATE TABLE entries (
	id INTEGER NOT NULL, 
	"key" VARCHAR(71) NOT NULL, 
	manifest VARCHAR(71) NOT NULL, 
	recipe TEXT NOT NULL, 
	recipe_digest VARCHAR(71), 
	method TEXT NOT NULL, 
	case_name TEXT NOT NULL, 
	rank INTEGER NOT NULL, 
	world_size INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	state_reason TEXT, 
	size_bytes BIGINT NOT NULL, 
	cold_seconds DOUBLE, 
	warm_seconds DOUBLE, 
	created_at DATETIME NOT NULL, 
	last_used_at DATETIME, 
	pinned BOOLEAN NOT NULL, 
	evidence VARCHAR(16) NOT NULL, model VARCHAR(71), 
	CONSTRAINT pk_entries PRIMARY KEY (id), 
	CONSTRAINT ck_entries_state CHECK (state IN ('ready', 'invalid', 'quarantined')), 
	CONSTRAINT ck_entries_evidence CHECK (evidence IN ('simulated', 'device')), 
	CONSTRAINT ck_entries_rank CHECK (rank >= 0 AND rank < world_size), 
	CONSTRAINT ck_entries_size_bytes CHECK (size_bytes >= 0), 
	CONSTRAINT uq_entries_manifest UNIQUE (manifest)
);
INSERT INTO "entries" VALUES(1,'sha256:cb48b5cc61ba34a36c9eb5e42c098767c0a314abb22f3355b1471f785b927755','sha256:41cb3696222154f0a9956a58a671b3e5bddc4d62a8676c100d6d439ef5684ff5','tiny-decoder','sha256:9f982c3078a261fc2e3f7043001034a11004b62539f2db03c2f7bd5d4f49e2af','main_decode','b4',0,2,'ready',NULL,5120,7.5,0.125,'2026-03-01 12:00:00.000000','2026-03-01 13:00:00.000000',1,'simulated','sha256:48b750b19e2adb31769253431c2a67e8c9898c2b3bd758e320c69bca7ee9cfc1');
INSERT INTO "entries" VALUES(2,'sha256:1361100391cbbc44f4f5c8b0679bdbac2b057ff0e70d0932bdffee6d63d29194','sha256:8dc9295ca46262403c84f862773b46e326068c87e11b8776444a19e3ecdc652e','tiny-decoder','sha256:9f982c3078a261fc2e3f7043001034a11004b62539f2db03c2f7bd5d4f49e2af','main_decode','b4',1,2,'quarantined','died twice',5120,7.5,0.125,'2026-03-01 12:00:00.000000',NULL,0,'simulated','sha256:48b750b19e2adb31769253431c2a67e8c9898c2b3bd758e320c69bca7ee9cfc1');
CREATE TABLE entry_files (
	entry_id INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	digest VARCHAR(71) NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	mode INTEGER NOT NULL, 
	CONSTRAINT pk_entry_files PRIMARY KEY (entry_id, path), 
	CONSTRAINT ck_entry_files_size_bytes CHECK (size_bytes >= 0), 
	CONSTRAINT fk_entry_files_entry_id_entries FOREIGN KEY(entry_id) REFERENCES entries (id) ON DELETE CASCADE
);
INSERT INTO "entry_files" VALUES(1,'compiled_module','sha256:49cd75a74bf254f112182b90a354981c2a9355193ce5494c8e445bc0360ce486',4096,384);
INSERT INTO "entry_files" VALUES(1,'kernels/common.run','sha256:eea96276bad0ea13c250c9f7ab7a1d9f8acdc1f2ad51e611df81b8dd41743fcf',1024,448);
INSERT INTO "entry_files" VALUES(2,'compiled_module','sha256:e1c2ffb51a8377da6576db3642cbeb49d75478f8316139343097d084ef45325a',4096,384);
INSERT INTO "entry_files" VALUES(2,'kernels/common.run','sha256:eea96276bad0ea13c250c9f7ab7a1d9f8acdc1f2ad51e611df81b8dd41743fcf',1024,448);
CREATE TABLE warm_set_members (
	warm_set_id INTEGER NOT NULL, 
	entry_id INTEGER NOT NULL, 
	CONSTRAINT pk_warm_set_members PRIMARY KEY (warm_set_id, entry_id), 
	CONSTRAINT fk_warm_set_members_warm_set_id_warm_sets FOREIGN KEY(warm_set_id) REFERENCES warm_sets (id) ON DELETE CASCADE, 
	CONSTRAINT fk_warm_set_members_entry_id_entries FOREIGN KEY(entry_id) REFERENCES entries (id) ON DELETE RESTRICT
);
INSERT INTO "warm_set_members" VALUES(1,1);
INSERT INTO "warm_set_members" VALUES(1,2);
CREATE TABLE warm_sets (
	id INTEGER NOT NULL, 
	warm_set VARCHAR(71) NOT NULL, 
	recipe TEXT NOT NULL, 
	recipe_digest VARCHAR(71) NOT NULL, 
	sequence BIGINT NOT NULL, 
	request TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_warm_sets PRIMARY KEY (id), 
	CONSTRAINT ck_warm_sets_state CHECK (state IN ('ready', 'invalid'))
);
INSERT INTO "warm_sets" VALUES(1,'sha256:a0e53c4dd3fec6d940eb29e131f01f2d6b65cb337b00667d7fa8197040b3fb58','tiny-decoder','sha256:9f982c3078a261fc2e3f7043001034a11004b62539f2db03c2f7bd5d4f49e2af',1,'{"options":{"frozen_parameter":true}}','invalid','2026-03-01 12:00:00.000000');
CREATE INDEX ix_entries_key_created_at ON entries ("key", created_at);
CREATE INDEX ix_entries_recipe_method_case_name_rank_created_at ON entries (recipe, method, case_name, rank, created_at);
CREATE INDEX ix_entries_state_created_at ON entries (state, created_at);
CREATE INDEX ix_entries_created_at ON entries (created_at);
CREATE INDEX ix_entry_files_digest ON entry_files (digest);
CREATE INDEX ix_warm_sets_recipe_digest_sequence ON warm_sets (recipe_digest, sequence);
CREATE INDEX ix_warm_sets_warm_set ON warm_sets (warm_set);
CREATE INDEX ix_warm_set_members_entry_id ON warm_set_members (entry_id);
CREATE INDEX ix_build_failures_expires_at ON build_failures (expires_at);
CREATE INDEX ix_entries_model_created_at ON entries (model, created_at);
COMMIT;
